// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/check_queue.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace attend {

CheckQueue::CheckQueue(const TenantWeights& weights) : share_(weights), lines_(weights.size()) {}

void CheckQueue::Push(std::unique_ptr<Request>& request, int64_t cost) {
  Line one(1);  // the only allocation
  Line& line = lines_[request->tenant];
  if (line.empty()) share_.Arrive(request->tenant);
  one.front() = {std::move(request), std::clamp(cost, kCostMin, kBatchCost)};
  line.splice(line.end(), one);
  ++size_;
}

std::unique_ptr<Request> CheckQueue::Remove(Line& line, Line::iterator place) {
  std::unique_ptr<Request> request = std::move(place->request);
  line.erase(place);
  --size_;
  return request;
}

std::unique_ptr<Request> CheckQueue::TakeNext() {
  int next = -1;
  int64_t floor = std::numeric_limits<int64_t>::max();
  for (int tenant = 0; tenant < static_cast<int>(lines_.size()); ++tenant) {
    if (lines_[tenant].empty() || share_.Tag(tenant) >= floor) continue;
    next = tenant;
    floor = share_.Tag(tenant);
  }
  if (next < 0) return nullptr;
  share_.Charge(next, lines_[next].front().cost, floor);
  return Remove(lines_[next], lines_[next].begin());
}

template <class Wanted>
std::unique_ptr<Request> CheckQueue::TakeFirst(const Wanted& wanted) {
  for (Line& line : lines_) {
    const auto place = std::find_if(line.begin(), line.end(),
                                    [&](const Waiting& each) { return wanted(*each.request); });
    if (place != line.end()) return Remove(line, place);
  }
  return nullptr;
}

std::unique_ptr<Request> CheckQueue::TakeById(uint64_t id) {
  return TakeFirst([id](const Request& request) { return request.id == id; });
}

std::unique_ptr<Request> CheckQueue::TakeExpired(TimePoint now) {
  return TakeFirst([now](const Request& request) { return request.deadline <= now; });
}

std::unique_ptr<Request> CheckQueue::TakeAny() {
  return TakeFirst([](const Request&) { return true; });
}

TimePoint CheckQueue::earliest_deadline() const {
  TimePoint earliest = kNever;
  for (const Line& line : lines_) {
    for (const Waiting& each : line) earliest = std::min(earliest, each.request->deadline);
  }
  return earliest;
}

}  // namespace attend
