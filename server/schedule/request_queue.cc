// SPDX-License-Identifier: Apache-2.0
//
// Each request is in up to five maps: by id, by arrival, by latest start, and in its tenant's lines
// by due time and newest first. All are updated together in Push and Remove. Push makes every
// allocation before it changes a sum, so a std::bad_alloc leaves the queue as it was.

#include "server/schedule/request_queue.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <new>
#include <string>

#include "server/util/rejection.h"

namespace attend {

RequestQueue::RequestQueue(const QueueOptions& options)
    : options_(options), tenant_sizes_(options.tenant_weights.size()) {}

Status RequestQueue::Push(std::unique_ptr<Request>& request) {
  if (full()) {
    request->enqueued = TimePoint();
    return ResourceExhausted(Rejection::kQueueFull, "queue: " + std::to_string(size()) +
                                                        " requests are waiting, the limit is " +
                                                        std::to_string(options_.capacity));
  }
  Request& r = *request;
  assert(!by_id_.contains(r.id) && "an id came twice");
  r.sequence = next_sequence_++;
  Level& level = levels_.try_emplace(r.priority, options_.tenant_weights, &nodes_).first->second;
  assert((level.arrivals.empty() || level.arrivals.rbegin()->second <= r.enqueued) &&
         "pushed in another order than that of arrival");
  TenantLines& lines = level.tenants[r.tenant];
  const bool arrives = lines.empty();
  try {
    level.arrivals.emplace_hint(level.arrivals.end(), r.sequence, r.enqueued);
    if (r.deadline != kNever) by_start_.emplace(LatestStart(r), r.id);
    Lines& line = lines.of(r);
    (DueAtDeadline(r) ? line.at_deadline : line.aging).emplace(PlaceOf(r), &r);
    if (DueAtDeadline(r)) line.newest.emplace(NewestPlace(r), &r);
    by_id_.try_emplace(r.id).first->second = std::move(request);
  } catch (const std::bad_alloc&) {
    Unline(r);
    by_start_.erase({LatestStart(r), r.id});
    level.arrivals.erase(r.sequence);
    r.enqueued = TimePoint();
    throw;
  }
  if (arrives) level.share.Arrive(r.tenant);
  tried_ += r.tried;
  ++tenant_sizes_[r.tenant];
  lines.of(r).time += r.expected;
  expected_ += r.expected;
  assert(size() <= options_.capacity);
  return Status();
}

RequestQueue::Place RequestQueue::PlaceOf(const Request& request) const {
  return {std::min(request.deadline, request.enqueued + options_.aging), request.sequence};
}

TimePoint RequestQueue::LatestStart(const Request& request) {
  return request.deadline - request.expected;
}

void RequestQueue::Unline(const Request& request) {
  Lines& line = LevelOf(request).tenants[request.tenant].of(request);
  (DueAtDeadline(request) ? line.at_deadline : line.aging).erase(PlaceOf(request));
  line.newest.erase(NewestPlace(request));
}

std::unique_ptr<Request> RequestQueue::Remove(const Request& request) {
  Level& level = LevelOf(request);
  TenantLines& lines = level.tenants[request.tenant];
  Unline(request);
  std::unique_ptr<Request> taken = std::move(by_id_.extract(request.id).mapped());
  if (taken->deadline != kNever) by_start_.erase({LatestStart(*taken), taken->id});
  level.arrivals.erase(taken->sequence);
  --tenant_sizes_[taken->tenant];
  lines.of(*taken).time -= taken->expected;
  expected_ -= taken->expected;
  if (DueAtDeadline(*taken) && lines.late > 0 && taken->sequence < lines.late_before) --lines.late;
  assert(lines.of(*taken).time >= Duration::zero());
  tried_ -= taken->tried;
  return taken;
}

std::vector<std::unique_ptr<Request>> RequestQueue::TakeBatch(const std::vector<QueuePick>& picks,
                                                              bool aged) {
  std::vector<std::unique_ptr<Request>> batch;
  batch.reserve(picks.size());
  ++batches_;
  batches_since_aged_ = aged ? 0 : batches_since_aged_ + 1;
  for (const QueuePick& pick : picks) {
    const Request& request = *by_id_.at(pick.id);
    Level& level = LevelOf(request);
    level.served_batch = batches_;
    level.share.Charge(request.tenant, request.cost, pick.floor);
    batch.push_back(Remove(request));
  }
  return batch;
}

std::unique_ptr<Request> RequestQueue::TakeById(uint64_t id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : Remove(*found->second);
}

std::vector<std::unique_ptr<Request>> RequestQueue::TakeHopeless(TimePoint now) {
  std::vector<std::unique_ptr<Request>> hopeless;
  while (!by_start_.empty() && by_start_.begin()->first <= now) {
    hopeless.push_back(TakeById(by_start_.begin()->second));
    NoteLate(*hopeless.back());
  }
  return hopeless;
}

void RequestQueue::NoteLate(const Request& request) {
  const auto level = levels_.find(request.priority);
  if (request.tried || level == levels_.end()) return;
  TenantLines& lines = level->second.tenants[request.tenant];
  if (lines.late > 0) return;
  lines.late = std::ssize(lines.small.newest) + std::ssize(lines.large.newest);
  lines.late_before = next_sequence_;
}

Duration RequestQueue::TimeBefore(const Request& request, TimePoint now, int64_t beside,
                                  Duration enough) const {
  const auto time = [&](const TenantLines& lines) {
    return request.large ? lines.small.time + lines.large.time : lines.small.time;
  };
  Duration large{0}, before{0};
  auto level = levels_.begin();
  for (; level != levels_.end() && level->first > request.priority; ++level) {
    for (const TenantLines& lines : level->second.tenants) {
      before += time(lines);
      large += lines.large.time;
    }
  }
  if (level != levels_.end() && level->first == request.priority) {
    const std::vector<TenantLines>& tenants = level->second.tenants;
    Duration own{0};
    const Place place{std::min(request.deadline, now + options_.aging), UINT64_MAX};
    const auto add = [&](const Line& line) {
      for (auto each = line.begin(); each != line.end() && each->first < place; ++each) {
        if ((own += each->second->expected) > enough) return;
      }
    };
    const TenantLines& lines = tenants[request.tenant];
    for (const Lines* each : {&lines.small, &lines.large}) {
      if (each == &lines.large && !request.large) break;
      add(each->aging);
      add(each->at_deadline);
    }
    const auto weight = [&](size_t tenant) {
      return std::max<int64_t>(1, options_.tenant_weights[tenant]);
    };
    const Duration meanwhile = (own + request.expected) / weight(request.tenant);
    for (size_t tenant = 0; tenant < tenants.size(); ++tenant) {
      large += tenants[tenant].large.time;
      if (static_cast<int>(tenant) == request.tenant) continue;
      before += std::min(time(tenants[tenant]), meanwhile * weight(tenant));
    }
    before += own;
  }
  if (!request.large) before += std::min(large, (before + request.expected) * beside);
  return before;
}

std::vector<std::unique_ptr<Request>> RequestQueue::TakeAll() {
  std::vector<std::unique_ptr<Request>> all;
  all.reserve(by_id_.size());
  while (!by_id_.empty()) all.push_back(Remove(*by_id_.begin()->second));
  // In order of arrival, so that the longest-waiting request is answered first.
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a->sequence < b->sequence; });
  return all;
}

void RequestQueue::ForgetShares() {
  for (auto& [priority, level] : levels_) level.share.Reset();
}

TimePoint RequestQueue::earliest_hopeless() const {
  return by_start_.empty() ? kNever : by_start_.begin()->first;
}

}  // namespace attend
