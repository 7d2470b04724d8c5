// SPDX-License-Identifier: Apache-2.0
//
// Answers waiting for their reference check: fair between tenants by the cost of the checks
// (fair_share.h), FIFO within a tenant. The caller bounds the size to some hundreds, so searches by
// id or deadline are linear.
//
// Not thread-safe: guarded by the checker.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "kernels/util/clock.h"
#include "server/request/request.h"
#include "server/schedule/fair_share.h"
#include "server/util/weight_share.h"

namespace attend {

class CheckQueue {
 public:
  // One weight for each tenant.
  explicit CheckQueue(const TenantWeights& weights);

  // `cost` is that of the check: kBatchCost for one that uses its whole work budget. May throw
  // std::bad_alloc; the caller then still owns the request.
  void Push(std::unique_ptr<Request>& request, int64_t cost);

  // Takes the answer to check next and charges its tenant; null if none waits.
  std::unique_ptr<Request> TakeNext();
  // The methods below charge no tenant. Null if the request is not queued.
  std::unique_ptr<Request> TakeById(uint64_t id);
  // Takes an answer whose deadline is at or before `now`; null if there is none.
  std::unique_ptr<Request> TakeExpired(TimePoint now);
  // Takes the oldest answer of any one tenant; null if none waits.
  std::unique_ptr<Request> TakeAny();
  // Call when nothing waits and no check runs: no tenant is owed anything then.
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
