// SPDX-License-Identifier: Apache-2.0
//
// Answers that wait for their reference check: fair between tenants by what their checks cost
// (fair_share.h), and first come, first served within one. Bounded by whoever fills it; as that is
// to some hundreds, what is wanted by id or deadline is looked for one by one.
//
// Not thread-safe: the checker guards it.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "server/request/request.h"
#include "server/schedule/fair_share.h"
#include "server/util/clock.h"

namespace attend {

class CheckQueue {
 public:
  // One weight for each tenant.
  explicit CheckQueue(const std::vector<int32_t>& weights);

  // `cost` of the check: kBatchCost for one that takes its whole budget of work. May throw
  // std::bad_alloc, and then has not taken the request.
  void Push(std::unique_ptr<Request>& request, int64_t cost);

  // The one to be checked next, whose tenant is charged; null if none waits.
  std::unique_ptr<Request> TakeNext();
  // Those below are not charged. Null if the request is not here.
  std::unique_ptr<Request> TakeById(uint64_t id);
  // One whose deadline is at or before `now`; null if there is none.
  std::unique_ptr<Request> TakeExpired(TimePoint now);
  // The one that came first of some tenant's; null if none waits.
  std::unique_ptr<Request> TakeAny();
  // Nobody waits and nothing is being checked: nobody is owed anything.
  void ForgetShares() { share_.Reset(); }

  TimePoint earliest_deadline() const;  // kNever if none
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  struct Waiting {
    std::unique_ptr<Request> request;
    int64_t cost = 0;
  };
  using Line = std::list<Waiting>;

  std::unique_ptr<Request> Remove(Line& line, Line::iterator place);
  template <class Wanted>
  std::unique_ptr<Request> TakeFirst(const Wanted& wanted);

  FairShare share_;
  std::vector<Line> lines_;  // by tenant
  int64_t size_ = 0;
};

}  // namespace attend
