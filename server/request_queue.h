// SPDX-License-Identifier: Apache-2.0
//
// Requests that were accepted and wait for a lane, in the order in which they should run: higher
// priority first, then the earlier deadline, then arrival.
//
// Not thread-safe: the device worker guards it. Always: size() <= capacity, and a refused Push
// changes nothing.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "kernels/status.h"
#include "server/clock.h"
#include "server/request.h"

namespace attend {

// A place in the order. Smaller runs first.
struct QueueKey {
  int32_t negated_priority = 0;
  TimePoint deadline = kNever;
  uint64_t sequence = 0;

  auto operator<=>(const QueueKey&) const = default;
};

class RequestQueue {
 public:
  using Ordered = std::map<QueueKey, std::unique_ptr<Request>>;

  explicit RequestQueue(int64_t capacity) : capacity_(capacity) {}

  // Takes `request` if and only if OK; RESOURCE_EXHAUSTED when full.
  Status Push(std::unique_ptr<Request>& request);

  std::unique_ptr<Request> Take(const QueueKey& key);
  // The request with this id, or null if it is not here (any more).
  std::unique_ptr<Request> TakeById(uint64_t id);
  // All whose deadline is at or before `now`, earliest first.
  std::vector<std::unique_ptr<Request>> TakeExpired(TimePoint now);
  std::vector<std::unique_ptr<Request>> TakeAll();

  const Ordered& ordered() const { return ordered_; }
  TimePoint earliest_deadline() const;  // kNever if none
  int64_t size() const { return static_cast<int64_t>(ordered_.size()); }
  bool empty() const { return ordered_.empty(); }
  double flops() const { return flops_; }  // waiting, for routing and retry hints

 private:
  std::unique_ptr<Request> TakeAt(Ordered::iterator at);

  const int64_t capacity_;
  uint64_t next_sequence_ = 0;
  double flops_ = 0;
  Ordered ordered_;
  std::unordered_map<uint64_t, QueueKey> by_id_;
  std::set<std::pair<TimePoint, QueueKey>> by_deadline_;  // finite deadlines only
};

}  // namespace attend
