// SPDX-License-Identifier: Apache-2.0
//
// Each Post queues one CheckNext with the worker threads. A CheckNext takes whichever request is
// next in queue order then, not the one it was posted with; requests that ended while waiting leave
// spare CheckNexts, which find nothing and return.
//
// A running check is stopped through its request's `stop` flag, which the row loops poll.
// Invariant: a request is in queue_, in running_ or owned by the one thread that ends it, so it
// ends exactly once. finish_ is never called under the lock.

#include "server/engine/checker.h"

#include <algorithm>
#include <cassert>
#include <new>
#include <optional>
#include <utility>

#include "kernels/contract/select.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/util/thread_name.h"
#include "kernels/util/trace_range.h"
#include "server/memory/memory_reserve.h"
#include "server/util/mix.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

// The status of a request that ends while it waits for its check.
Status WaitingStatus(Code code) {
  return EndedStatus(code, "the answer waited for its check",
                     "the answer still waited for its check");
}

}  // namespace

Checker::Checker(const CheckerOptions& options, const TenantWeights& tenant_weights,
                 const Clock& clock, HostPool& pool,
                 std::function<void(std::unique_ptr<Request>)> finish)
    : options_(options),
      clock_(clock),
      pool_(pool),
      finish_(std::move(finish)),
      queue_(tenant_weights),
      workers_(std::make_unique<WorkerThreads>("attend-check", options.threads,
                                               thresholds::kCheckNiceness)) {
  running_.reserve(static_cast<size_t>(workers_->size()));
  watcher_ = std::thread([this] { WatchDeadlines(); });
}

Checker::~Checker() { Stop(); }

void Checker::Stop() {
  if (!watcher_.joinable()) return;
  workers_.reset();
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  due_.NotifyAll();
  watcher_.join();
}

bool Checker::Sampled(uint64_t id) const { return InSample(options_.seed, id, options_.sample); }

double Checker::WorkBudget(const Request& request) const {
  const bool sampled = request.check == AnswerCheck::kSampled;
  return sampled ? options_.sampled_work_budget : options_.work_budget;
}

bool Checker::HasRoom() const {
  const MutexLock lock(mutex_);
  return queue_.size() + busy_ < options_.backlog_max;
}

bool Checker::Reserve() {
  if (places_.fetch_add(1, std::memory_order_relaxed) < options_.places_max) return true;
  Release();
  return false;
}

void Checker::Post(std::unique_ptr<Request> request) {
  const uint64_t id = request->id;
  Responder& responder = *request->responder;
  const double work =
      static_cast<double>(CountRows(request->attention)) * CheckWork(request->attention.problem);
  const double share = std::min(1.0, work / WorkBudget(*request));
  MutexLock lock(mutex_);
  if (aborted_) return End(std::move(request), Code::kUnavailable);
  const TimePoint deadline = request->deadline;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    workers_->Post([this] { CheckNext(); });  // blocks on the lock until Post returns
    queue_.Push(request, static_cast<int64_t>(share * static_cast<double>(kBatchCost)));
  } catch (const std::bad_alloc&) {
    lock.Unlock();
    Fail(*request, ResourceExhausted("no memory to check the answer"));
    return finish_(std::move(request));
  }
  if (deadline < watched_) {
    watched_ = deadline;
    due_.NotifyOne();
  }
  // A cancellation before the push found nothing to cancel.
  if (responder.unwanted()) {
    if (request = queue_.TakeById(id); request != nullptr) {
      const Code why = CancelCode(*request, clock_.Now());
      End(std::move(request), why);
    }
  }
}

void Checker::Cancel(uint64_t id) {
  const MutexLock lock(mutex_);
  for (Request* const running : running_) {
    if (running->id == id) return StopRunning(*running, CancelCode(*running, clock_.Now()));
  }
  std::unique_ptr<Request> request = queue_.TakeById(id);
  if (request == nullptr) return;
  const Code why = CancelCode(*request, clock_.Now());
  End(std::move(request), why);
}

void Checker::Abort() {
  const MutexLock lock(mutex_);
  aborted_ = true;
  for (Request* const running : running_) StopRunning(*running, Code::kUnavailable);
  while (std::unique_ptr<Request> request = queue_.TakeAny()) {
    End(std::move(request), Code::kUnavailable);
  }
}

void Checker::AddBusy(std::vector<BusyRequest>& busy) const {
  const MutexLock lock(mutex_);
  for (const Request* const running : running_) {
    busy.push_back(Busy(*running, "reference check"));
  }
}

void Checker::Fail(Request& request, Status why) {
  // INVALID_ARGUMENT: the check would copy more than its bound.
  const bool may_go_unchecked = why.code() == Code::kUnavailable ||
                                why.code() == Code::kResourceExhausted ||
                                why.code() == Code::kInvalidArgument;
  if (request.check != AnswerCheck::kSampled || !may_go_unchecked) request.status = std::move(why);
}

void Checker::End(std::unique_ptr<Request> request, Code code) {
  mutex_.Unlock();
  Fail(*request, WaitingStatus(code));
  finish_(std::move(request));
  mutex_.Lock();
}

TimePoint Checker::EarliestDeadline() const {
  TimePoint earliest = queue_.earliest_deadline();
  for (const Request* const running : running_) {
    if (!running->stop.set()) earliest = std::min(earliest, running->deadline);
  }
  return earliest;
}

void Checker::WatchDeadlines() {
  NameThread("attend-due");
  const MutexLock lock(mutex_);
  while (!stop_) {
    const TimePoint now = clock_.Now();
    for (Request* const running : running_) {
      if (running->deadline <= now) StopRunning(*running, Code::kDeadlineExceeded);
    }
    while (std::unique_ptr<Request> request = queue_.TakeExpired(now)) {
      End(std::move(request), Code::kDeadlineExceeded);
    }
    if (stop_) return;  // set while End had released the lock
    watched_ = EarliestDeadline();
    clock_.WaitUntil(due_, mutex_, watched_);
  }
}

void Checker::CheckNext() {
  std::unique_ptr<Request> request;
  {
    const MutexLock lock(mutex_);
    request = queue_.TakeNext();
    if (request == nullptr) return;  // cancelled or expired while waiting
    assert(running_.size() < running_.capacity() && "more run than there are threads");
    running_.push_back(request.get());
    ++busy_;
  }
  Check(*request);
  {
    const MutexLock lock(mutex_);
    std::erase(running_, request.get());
    if (queue_.empty()) queue_.ForgetShares();
  }
  if (request->stop.set()) {
    request->report.reset();
    Fail(*request, StoppedStatus(request->stop_code));
  }
  finish_(std::move(request));
  const MutexLock lock(mutex_);
  --busy_;
}

Result<FetchedKeys> Checker::FetchKeys(const Request& request, std::span<const RowId> rows) const {
  // The pool never has a larger block.
  const int64_t bytes_max = std::min(options_.copied_bytes_max, pool_.block_bytes_max());
  return FetchedKeys::Fetch(request.attention, request.source.cache()->arena(), rows, pool_,
                            request.tenant, bytes_max);
}

void Checker::Check(Request& request) {
  const TraceRange range("attend: check an answer");
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const TimePoint begin = clock_.Now();
    if (request.backward) {
      request.report = CheckGradients(request.attention, request.backward->gradients,
                                      Mix(options_.seed ^ request.id), WorkBudget(request),
                                      &request.stop, RoundsWeights(request.selection.kernel));
      request.check_ns = NanosecondsBetween(begin, clock_.Now());
      return;
    }
    Attention attention = request.attention;
    const CacheHold* const cache = request.source.cache();
    const bool fetch = cache != nullptr && !cache->arena().on_host();
    if (fetch) attention.v.data = nullptr;  // V is not readable here: choose the rows without it
    const std::vector<RowId> rows =
        SampleRows(attention, Mix(options_.seed ^ request.id), WorkBudget(request), &request.stop);
    std::optional<FetchedKeys> keys;
    if (fetch) {
      Result<FetchedKeys> fetched = FetchKeys(request, rows);
      if (!fetched.ok()) return Fail(request, fetched.status());
      keys.emplace(*std::move(fetched));
      attention = keys->attention();
    }
    request.report =
        CheckRows(attention, rows, &request.stop, RoundsWeights(request.selection.kernel));
    request.report->rows_total = CountRows(request.attention);
    request.check_ns = NanosecondsBetween(begin, clock_.Now());
  } catch (const std::bad_alloc&) {
    request.report.reset();
    Fail(request, ResourceExhausted("no memory for the reference check"));
  }
}

}  // namespace attend
