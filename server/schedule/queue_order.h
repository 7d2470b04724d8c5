// SPDX-License-Identifier: Apache-2.0
//
// The order in which waiting requests should start. Pure: it walks the queue without changing it,
// and is valid only while the queue does not change. Large requests are skipped unless they are
// allowed.
//
// 1. Higher priority first.
// 2. Between tenants of one priority: earlier deadline first, but a deadline moves a tenant at most
//    one batch's worth ahead of its fair position. Deadlines buy order, not share.
// 3. Otherwise the tenant furthest behind its fair share (FairShare).
// 4. Within a tenant: the request that is due first. It is due at its deadline, but at most `aging`
//    after its arrival.
//    While the line is late (RequestQueue::TenantLines), requests due at their deadlines go newest
//    first. In deadline order, each would start when it is nearly late, and all would be late. They
//    come after the other requests that are due, and before those that are not due yet.
// 5. If requests of lower priorities have waited for `aging`, every kAgedEvery-th batch
//    (util/thresholds.h) begins with the next request of such a priority, the least recently served
//    one among them.
//
// No request starves, except where large requests of higher priorities take every turn that large
// requests get (`large_allowed`, with several lanes). Let costs be in batches, B_t the largest cost
// of a request of tenant t (at most 1 unless large) and w_t its weight. While a request r of tenant
// i may run:
// - no request of i and of r's priority starts before r if it arrived after r was due, which is at
//   most `aging` after r arrived, unless r is due at its deadline and its line is late;
// - every other tenant j of r's priority starts, while r waits, requests that cost at most
//   w_j / w_i * (W + B_i + 1) + B_j + 2, where W is the cost of what i starts in that time;
// - while a higher priority waits too, once r has waited for `aging`: of any kAgedEvery * n batches
//   that start, one takes a request of r's priority, where n priorities wait like that.
// A request ends at its deadline at the latest. So without deadlines, r's wait is bounded by what
// can be queued (the queue's capacity, an upload with all its parts) and the lanes' speed, whatever
// arrives after it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <vector>

#include "kernels/util/clock.h"
#include "server/schedule/fair_share.h"
#include "server/schedule/request_queue.h"

namespace attend {

class QueueOrder {
 public:
  QueueOrder(const RequestQueue& queue, bool large_allowed, TimePoint now);
  QueueOrder(const QueueOrder&) = delete;
  QueueOrder& operator=(const QueueOrder&) = delete;

  // The request that should start next, or null if there is none.
  const Request* Peek();
  // Takes that request and moves on to the next.
  QueuePick Take();
  // Passes over that request, which will not start.
  void Skip();
  // Passes over all requests of its tenant and priority: they must wait.
  void SkipTenant();
  // Whether the first request was chosen by rule 5.
  bool aged() const { return aged_.has_value(); }

 private:
  // The untaken rest of a line.
  struct Rest {
    RequestQueue::Line::const_iterator next, end;
  };
  // A tenant's requests of one priority that are not taken yet.
  class Candidate {
   public:
    Candidate(int tenant, const RequestQueue::TenantLines& lines, bool large_allowed,
              TimePoint now);

    bool empty() const { return head_ == nullptr; }
    const Request& head() const { return *head_; }
    void Next();

    int tenant;

   private:
    void FindHead();

    bool late_;
    TimePoint now_;
    std::array<Rest, 4> rests_;  // small, then large; of each, `aging`, then due at deadline
    size_t head_rest_ = 0;
    const Request* head_ = nullptr;
  };
  // One priority.
  struct View {
    const RequestQueue::Level* level;
    FairShare share;  // charged for requests taken by this walk
    std::pmr::vector<Candidate> candidates;
  };

  void ChooseAged(const RequestQueue& queue, TimePoint now);
  void Choose();
  void Next();

  // Enough for a few tenants of one priority; beyond that, memory comes from the heap.
  std::array<std::byte, 1024> room_;
  std::pmr::monotonic_buffer_resource memory_{room_.data(), room_.size()};
  std::pmr::vector<View> views_{&memory_};  // only non-empty ones, highest priority first
  std::optional<size_t> aged_;              // the view that goes first by rule 5
  bool started_ = false;                    // a request has been taken
  // The result of Peek.
  bool chosen_ = false;
  View* view_ = nullptr;
  size_t candidate_ = 0;
  int64_t floor_ = 0;
};

}  // namespace attend
