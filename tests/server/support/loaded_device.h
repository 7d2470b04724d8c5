// SPDX-License-Identifier: Apache-2.0
//
// A device under load on a manual clock: a real Scheduler, lanes that share the device's time, and
// kernels that stop on request. The device knows the true durations of requests; the scheduler has
// to learn them.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/schedule/scheduler.h"

namespace attend::test {

// Requests that arrive continuously: at random times, or each when the previous one has ended.
struct Load {
  double rate_per_s = 0;  // open loop; 0: `callers` that each have one request in flight
  int callers = 0;
  double cost = 1e6;
  Duration takes = std::chrono::milliseconds(10);  // of the device, alone
  Duration deadline{0};                            // 0: none
  int tenant = 0;
  int32_t priority = 0;
};

struct LoadCounts {
  int64_t sent = 0;
  int64_t in_time = 0;
  int64_t refused = 0;
  int64_t dropped = 0;  // while they waited
  int64_t stopped = 0;  // while they ran
};

class LoadedDevice {
 public:
  explicit LoadedDevice(const SchedulerOptions& options, uint64_t seed = 1);

  // Whether the scheduler is told how long batches took.
  bool learns = true;
  // Factor by which everything takes longer from now on.
  double slowness = 1;

  // Runs all loads for this long. Returns the outcomes of each one's requests.
  std::vector<LoadCounts> Run(const std::vector<Load>& loads, Duration duration);
  TimePoint now() const { return now_; }
  Scheduler& scheduler() { return scheduler_; }

 private:
  struct Batch {
    std::vector<std::unique_ptr<Request>> requests;
    double left_ns = 0;  // of the device's time
  };
  void Send(size_t load);
  void Again(size_t load, Duration after);
  void Plan();
  void Advance(TimePoint to);
  void EndBatches();
  TimePoint NextEnd() const;
  void Count(const Request& request);

  std::mt19937_64 random_;
  Scheduler scheduler_;
  TimePoint now_{std::chrono::seconds(1000)};
  TimePoint wake_ = kNever;
  std::multimap<TimePoint, size_t> arrivals_;  // loads
  std::vector<Batch> lanes_;
  std::vector<Load> loads_;
  std::vector<LoadCounts> counts_;
  std::map<uint64_t, size_t> load_of_;  // by request
  uint64_t next_id_ = 1;
};

}  // namespace attend::test
