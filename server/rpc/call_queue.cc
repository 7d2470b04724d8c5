// SPDX-License-Identifier: Apache-2.0
//
// `running_` counts the Run loops, at most running_max_. A loop runs one call and posts itself
// again, so copies and other work of the threads get their turn; it ends when nothing waits.
// Invariant: while calls wait, at least one loop runs.

#include "server/rpc/call_queue.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/util/rejection.h"

namespace attend {

CallQueue::CallQueue(WorkerThreads& workers, const TenantWeights& weights, const Clock& clock)
    : workers_(workers),
      clock_(clock),
      running_max_(std::max(1, workers.size() / 2)),
      share_(weights),
      tenants_(weights.size()) {}

Status CallQueue::Post(int tenant, int64_t bytes, std::function<void()> work) {
  // Allocated here, so that nothing is allocated under the lock or after the call is queued.
  std::list<Job> job;
  job.push_back({std::move(work), bytes});
  bool start = false;
  ATTEND_RETURN_IF_ERROR(Place(tenant, job, start));
  if (!start) return Status();
  // If it cannot be posted, this thread runs the calls.
  if (!TryAllocating([this] { workers_.Post([this] { Run(); }); })) Run();
  return Status();
}

Status CallQueue::Place(int tenant, std::list<Job>& job, bool& start) {
  const MutexLock lock(mutex_);
  Tenant& of = tenants_[tenant];
  const int64_t count = std::ssize(of.waiting);
  const int64_t bytes = of.bytes + job.front().bytes;
  if (count >= kCallsMax || bytes > kBytesMax) {
    return ResourceExhausted(Rejection::kQueueFull,
                             "small calls: " + std::to_string(count) +
                                 " of the tenant are waiting, with " + std::to_string(bytes) +
                                 " bytes including this one; at most " + std::to_string(kCallsMax) +
                                 " may wait, with " + std::to_string(kBytesMax) + " bytes");
  }
  if (count == 0 && of.running == 0) share_.Arrive(tenant);
  of.bytes = bytes;
  of.waiting.splice(of.waiting.end(), job);
  ++waiting_;
  start = running_ < running_max_;
  running_ += start ? 1 : 0;
  return Status();
}

void CallQueue::Run() {
  for (;;) {
    std::list<Job> job;
    int tenant = 0;
    int64_t floor = 0;
    if (!Take(job, tenant, floor)) return;
    const TimePoint began = clock_.Now();
    job.front().work();
    job.clear();  // releases what it captured
    if (!End(tenant, clock_.Now() - began, floor)) return;
    if (TryAllocating([this] { workers_.Post([this] { Run(); }); })) return;
  }
}

bool CallQueue::Take(std::list<Job>& job, int& tenant, int64_t& floor) {
  const MutexLock lock(mutex_);
  floor = std::numeric_limits<int64_t>::max();
  for (size_t n = 0; n < tenants_.size(); ++n) {
    if (tenants_[n].waiting.empty() || share_.Tag(static_cast<int>(n)) >= floor) continue;
    tenant = static_cast<int>(n);
    floor = share_.Tag(tenant);
  }
  if (waiting_ == 0) {
    LeaveLocked();
    return false;
  }
  Tenant& of = tenants_[tenant];
  job.splice(job.end(), of.waiting, of.waiting.begin());
  of.bytes -= job.front().bytes;
  ++of.running;
  --waiting_;
  return true;
}

bool CallQueue::End(int tenant, Duration took, int64_t floor) {
  const MutexLock lock(mutex_);
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
  share_.Charge(tenant, std::clamp(ns, kCostMin, kCostMax), floor);
  --tenants_[tenant].running;
  if (waiting_ > 0) return true;
  LeaveLocked();
  return false;
}

void CallQueue::LeaveLocked() {
  if (--running_ == 0) share_.Reset();
}

}  // namespace attend
