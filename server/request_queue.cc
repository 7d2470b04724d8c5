// SPDX-License-Identifier: Apache-2.0

#include "server/request_queue.h"

#include <algorithm>
#include <cassert>
#include <string>

namespace attend {

Status RequestQueue::Push(std::unique_ptr<Request>& request) {
  if (size() >= capacity_) {
    return ResourceExhausted("queue: " + std::to_string(size()) + " requests wait, the limit is " +
                             std::to_string(capacity_));
  }
  const QueueKey key{-request->priority, request->deadline, next_sequence_++};
  flops_ += request->flops;
  by_id_.emplace(request->id, key);
  if (key.deadline != kNever) by_deadline_.emplace(key.deadline, key);
  ordered_.emplace(key, std::move(request));
  return Status();
}

std::unique_ptr<Request> RequestQueue::TakeAt(Ordered::iterator at) {
  std::unique_ptr<Request> request = std::move(at->second);
  by_id_.erase(request->id);
  if (at->first.deadline != kNever) by_deadline_.erase({at->first.deadline, at->first});
  ordered_.erase(at);
  // Sums of doubles drift; an empty queue is exactly empty.
  flops_ = ordered_.empty() ? 0 : std::max(0.0, flops_ - request->flops);
  return request;
}

std::unique_ptr<Request> RequestQueue::Take(const QueueKey& key) {
  const auto at = ordered_.find(key);
  assert(at != ordered_.end());
  return TakeAt(at);
}

std::unique_ptr<Request> RequestQueue::TakeById(uint64_t id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  return TakeAt(ordered_.find(found->second));
}

std::vector<std::unique_ptr<Request>> RequestQueue::TakeExpired(TimePoint now) {
  std::vector<std::unique_ptr<Request>> expired;
  while (!by_deadline_.empty() && by_deadline_.begin()->first <= now) {
    expired.push_back(TakeAt(ordered_.find(by_deadline_.begin()->second)));
  }
  return expired;
}

std::vector<std::unique_ptr<Request>> RequestQueue::TakeAll() {
  std::vector<std::unique_ptr<Request>> all;
  all.reserve(ordered_.size());
  while (!ordered_.empty()) all.push_back(TakeAt(ordered_.begin()));
  return all;
}

TimePoint RequestQueue::earliest_deadline() const {
  return by_deadline_.empty() ? kNever : by_deadline_.begin()->first;
}

}  // namespace attend
