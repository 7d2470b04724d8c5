// SPDX-License-Identifier: Apache-2.0
//
// Decides what runs next. Pure: it sees the queue in order, the time and the lanes' state, and
// returns what to take or when to look again; it owns no thread and changes nothing.
//
// Work-conserving: a free lane takes what waits, up to a budget of requests, FLOPs and bytes, and
// always at least one request. No artificial delay unless one is asked for. Large requests never
// hold every lane: the last free lane is kept for small ones.

#pragma once

#include <cstdint>
#include <vector>

#include "server/clock.h"
#include "server/request_queue.h"

namespace attend {

struct BatcherOptions {
  int64_t batch_requests_max = 64;
  double batch_flops_max = 2e9;  // a request above it is "large" and runs alone
  int64_t batch_bytes_max = int64_t{64} << 20;
  Duration batch_delay{0};  // wait this long for company when lanes are free
};

struct LaneState {
  int total = 1;
  int free = 1;
  int large = 0;  // lanes that run a large request now
};

struct BatchDecision {
  std::vector<QueueKey> take;  // empty: nothing now
  bool large = false;          // the batch is one large request
  TimePoint wake = kNever;     // when to ask again if nothing happens before
};

class Batcher {
 public:
  explicit Batcher(const BatcherOptions& options) : options_(options) {}

  BatchDecision Next(const RequestQueue& queue, const LaneState& lanes, TimePoint now) const;

  bool IsLarge(double flops, int64_t bytes) const {
    return flops > options_.batch_flops_max || bytes > options_.batch_bytes_max;
  }

 private:
  BatcherOptions options_;
};

}  // namespace attend
