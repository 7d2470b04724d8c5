// SPDX-License-Identifier: Apache-2.0
//
// A metrics endpoint as Prometheus reads it.

#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>

namespace attend::bench {

// The text that http://`address`/metrics answers with; empty if it fails.
std::string Scrape(const std::string& address);

// The sum of all samples of a family that have `label` (name="value") among their labels, or
// whatever their labels if it is empty; none if there is no such sample.
std::optional<double> MetricSum(const std::string& exposition, const std::string& family,
                                const std::string& label = "");

// Scrapes every second on a thread of its own, until it is destroyed.
class Scraper {
 public:
  explicit Scraper(std::string address);
  ~Scraper();
  // Answers that were not empty.
  int64_t scrapes() const { return scrapes_; }

 private:
  void Run();

  const std::string address_;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> scrapes_ = 0;
  std::thread thread_;
};

}  // namespace attend::bench
