// SPDX-License-Identifier: Apache-2.0
//
// A merge of sorted lines. Each tenant of a priority has up to four lines (small and large, by kind
// of due time) whose least head is the tenant's candidate (rule 4). Choose picks among the
// candidates of one priority: those within a batch of the fair floor compete by deadline, then tag,
// then arrival (rules 2 and 3). Charges go to a copy of the priority's FairShare, so that the walk
// leaves the queue as it is and the queue can repeat them with the recorded floors.

#include "server/schedule/queue_order.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "server/util/thresholds.h"

namespace attend {

QueueOrder::QueueOrder(const RequestQueue& queue, bool large_allowed, TimePoint now) {
  for (const auto& [priority, level] : queue.levels()) {
    if (level.arrivals.empty()) continue;
    std::pmr::vector<Candidate> candidates(&memory_);
    for (size_t tenant = 0; tenant < level.tenants.size(); ++tenant) {
      const RequestQueue::TenantLines& lines = level.tenants[tenant];
      Candidate candidate(static_cast<int>(tenant), lines, large_allowed, now);
      if (candidate.empty()) continue;
      candidates.push_back(candidate);
    }
    if (!candidates.empty()) views_.push_back({&level, level.share, std::move(candidates)});
  }
  if (queue.batches_since_aged() + 1 >= thresholds::kAgedEvery) ChooseAged(queue, now);
}

QueueOrder::Candidate::Candidate(int of, const RequestQueue::TenantLines& lines, bool large_allowed,
                                 TimePoint now)
    : tenant(of), late_(lines.late > 0), now_(now) {
  size_t rest = 0;
  for (const RequestQueue::Lines* each : {&lines.small, &lines.large}) {
    for (const RequestQueue::Line* line :
         {&each->aging, late_ ? &each->newest : &each->at_deadline}) {
      const bool allowed = each == &lines.small || large_allowed;
      rests_[rest++] = {allowed ? line->begin() : line->end(), line->end()};
    }
  }
  FindHead();
}

void QueueOrder::Candidate::FindHead() {
  head_ = nullptr;
  std::pair<int, RequestQueue::Place> first;
  for (size_t i = 0; i < rests_.size(); ++i) {
    if (rests_[i].next == rests_[i].end) continue;
    const auto& [place, request] = *rests_[i].next;
    const bool ages = i % 2 == 0;
    const std::pair rank(!late_ || (ages && place.due <= now_) ? 0 : ages ? 2 : 1, place);
    if (head_ != nullptr && first < rank) continue;
    first = rank;
    head_ = request;
    head_rest_ = i;
  }
}

void QueueOrder::Candidate::Next() {
  ++rests_[head_rest_].next;
  FindHead();
}

void QueueOrder::ChooseAged(const RequestQueue& queue, TimePoint now) {
  for (size_t i = 1; i < views_.size(); ++i) {
    const RequestQueue::Level& level = *views_[i].level;
    if (now - level.arrivals.begin()->second < queue.aging()) continue;
    if (!aged_ || level.served_batch < views_[*aged_].level->served_batch) aged_ = i;
  }
}

const Request* QueueOrder::Peek() {
  if (!chosen_) Choose();
  return view_ == nullptr ? nullptr : &view_->candidates[candidate_].head();
}

void QueueOrder::Choose() {
  chosen_ = true;
  view_ = nullptr;
  // All of its requests were skipped.
  if (aged_ && !started_ && views_[*aged_].candidates.empty()) aged_.reset();
  if (aged_ && !started_) {
    view_ = &views_[*aged_];
  } else {
    const auto at = std::find_if(views_.begin(), views_.end(),
                                 [](const View& view) { return !view.candidates.empty(); });
    if (at == views_.end()) return;
    view_ = &*at;
  }
  const FairShare& share = view_->share;
  floor_ = std::numeric_limits<int64_t>::max();
  for (const Candidate& each : view_->candidates) {
    floor_ = std::min(floor_, share.Tag(each.tenant));
  }
  const auto rank = [&](const Candidate& each) {
    const Request& head = each.head();
    return std::tuple(head.deadline, share.Tag(each.tenant), head.sequence);
  };
  candidate_ = view_->candidates.size();
  for (size_t i = 0; i < view_->candidates.size(); ++i) {
    const Candidate& each = view_->candidates[i];
    if (share.Tag(each.tenant) > floor_ + share.Batch(each.tenant)) continue;
    if (candidate_ == view_->candidates.size() ||
        rank(each) < rank(view_->candidates[candidate_])) {
      candidate_ = i;
    }
  }
}

QueuePick QueueOrder::Take() {
  const Request& request = *Peek();
  const QueuePick pick{request.id, floor_};
  view_->share.Charge(request.tenant, request.cost, floor_);
  started_ = true;
  Next();
  return pick;
}

void QueueOrder::Skip() {
  Peek();
  Next();
}

void QueueOrder::SkipTenant() {
  Peek();
  view_->candidates.erase(view_->candidates.begin() + static_cast<ptrdiff_t>(candidate_));
  chosen_ = false;
}

void QueueOrder::Next() {
  Candidate& candidate = view_->candidates[candidate_];
  candidate.Next();
  if (candidate.empty()) {
    view_->candidates.erase(view_->candidates.begin() + static_cast<ptrdiff_t>(candidate_));
  }
  chosen_ = false;
}

}  // namespace attend
