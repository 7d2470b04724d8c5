// SPDX-License-Identifier: Apache-2.0
//
// Reads a metrics endpoint, as Prometheus does.

#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>

namespace attend::bench {

// The text of http://`address`/metrics; empty on failure.
std::string Scrape(const std::string& address);

// The sum of a family's samples with the label `label` (name="value"), or of all if it is empty;
// nullopt if there are none.
std::optional<double> MetricSum(const std::string& exposition, const std::string& family,
                                const std::string& label = "");

// Scrapes every second on a thread, until destroyed.
class Scraper {
 public:
  explicit Scraper(std::string address);
  ~Scraper();
  // Number of answers that were not empty.
  int64_t scrapes() const { return scrapes_; }

 private:
  void Run();

  const std::string address_;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> scrapes_ = 0;
  std::thread thread_;
};

}  // namespace attend::bench
