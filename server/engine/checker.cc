// SPDX-License-Identifier: Apache-2.0

#include "server/engine/checker.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "kernels/util/thread_name.h"
#include "kernels/util/trace_range.h"
#include "server/memory/memory_reserve.h"

namespace attend {
namespace {

// Where all cores are busy, checks take what serving leaves, and some 10 % of a core besides. They
// also answer at that priority, as who waits for a check waits for the rest too.
constexpr int kNicer = 10;
constexpr Duration kLookLeast = std::chrono::milliseconds(1);

// SplitMix64 (Steele, Lea & Flood 2014): well-mixed bits of a counter.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// How a request ends that waited for its check.
Status WaitingStatus(Code code) {
  switch (code) {
    case Code::kDeadlineExceeded:
      return Status(code, "the deadline passed while the answer waited for its check");
    case Code::kUnavailable:
      return Unavailable("the server ends, and the answer still waited for its check");
    default:
      return Status(code, "cancelled by the client while the answer waited for its check");
  }
}

}  // namespace

Checker::Checker(const CheckerOptions& options, const Clock& clock,
                 std::function<void(std::unique_ptr<Request>)> finish)
    : options_(options),
      clock_(clock),
      finish_(std::move(finish)),
      queue_(options.tenant_weights),
      running_(std::max(1, options.threads)) {
  for (Request*& running : running_) threads_.emplace_back([this, &running] { Run(running); });
  watcher_ = std::thread([this] { WatchDeadlines(); });
}

Checker::~Checker() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  due_.notify_all();
  watcher_.join();
}

bool Checker::Sampled(uint64_t id) const {
  if (options_.sample <= 0) return false;
  const double draw = static_cast<double>(Mix(options_.seed ^ Mix(id)) >> 11) * 0x1p-53;
  return draw < options_.sample;
}

bool Checker::HasRoom() const {
  const std::lock_guard lock(mutex_);
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
  const double budget =
      request->check_sampled ? options_.sampled_work_budget : options_.work_budget;
  const double work =
      static_cast<double>(CountRows(request->attention)) * CheckWork(request->attention.problem);
  const double share = std::min(1.0, work / budget);
  Lock lock(mutex_);
  if (aborted_) return End(lock, std::move(request), Code::kUnavailable);
  const TimePoint deadline = request->deadline;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    queue_.Push(request, static_cast<int64_t>(share * static_cast<double>(kBatchCost)));
  } catch (const std::bad_alloc&) {
    lock.unlock();
    Fail(*request, ResourceExhausted("there is no memory to have the answer checked"));
    return finish_(std::move(request));
  }
  const bool earlier = deadline < watched_;
  if (earlier) watched_ = deadline;
  // A cancellation that came before the request was here found nothing to cancel.
  if (responder.unwanted()) {
    if (request = queue_.TakeById(id); request != nullptr) {
      const bool late = deadline <= clock_.Now();
      End(lock, std::move(request), late ? Code::kDeadlineExceeded : Code::kCancelled);
    }
    return;
  }
  lock.unlock();
  wake_.notify_one();
  if (earlier) due_.notify_one();
}

void Checker::Cancel(uint64_t id) {
  Lock lock(mutex_);
  const auto code = [this](const Request& request) {
    return request.deadline <= clock_.Now() ? Code::kDeadlineExceeded : Code::kCancelled;
  };
  for (Request* const running : running_) {
    if (running != nullptr && running->id == id) return StopRunning(*running, code(*running));
  }
  std::unique_ptr<Request> request = queue_.TakeById(id);
  if (request == nullptr) return;
  const Code why = code(*request);
  End(lock, std::move(request), why);
}

void Checker::Abort() {
  Lock lock(mutex_);
  aborted_ = true;
  for (Request* const running : running_) {
    if (running != nullptr) StopRunning(*running, Code::kUnavailable);
  }
  while (std::unique_ptr<Request> request = queue_.TakeAny()) {
    End(lock, std::move(request), Code::kUnavailable);
  }
}

void Checker::AddBusy(std::vector<BusyRequest>& busy) const {
  const std::lock_guard lock(mutex_);
  for (const Request* const running : running_) {
    if (running != nullptr) busy.push_back(Busy(*running, "reference check"));
  }
}

void Checker::Fail(Request& request, Status why) {
  const bool may_go_unchecked =
      why.code() == Code::kUnavailable || why.code() == Code::kResourceExhausted;
  if (!request.check_sampled || !may_go_unchecked) request.status = std::move(why);
}

void Checker::End(Lock& lock, std::unique_ptr<Request> request, Code code) {
  lock.unlock();
  Fail(*request, WaitingStatus(code));
  finish_(std::move(request));
  lock.lock();
}

TimePoint Checker::EarliestDeadlineLocked() const {
  TimePoint earliest = queue_.earliest_deadline();
  for (const Request* const running : running_) {
    if (running == nullptr || running->stop.set()) continue;
    earliest = std::min(earliest, running->deadline);
  }
  return earliest;
}

void Checker::WatchDeadlines() {
  NameThread("attend-due");
  Lock lock(mutex_);
  for (;;) {
    const TimePoint now = clock_.Now();
    for (Request* const running : running_) {
      if (running != nullptr && running->deadline <= now) {
        StopRunning(*running, Code::kDeadlineExceeded);
      }
    }
    while (std::unique_ptr<Request> request = queue_.TakeExpired(now)) {
      End(lock, std::move(request), Code::kDeadlineExceeded);
    }
    const auto idle = [](const Request* request) { return request == nullptr; };
    if (stop_ && queue_.empty() && std::all_of(running_.begin(), running_.end(), idle)) return;
    watched_ = EarliestDeadlineLocked();
    if (watched_ == kNever) {
      due_.wait(lock);
    } else {
      // Not less: with a clock that stands still this must not spin.
      due_.wait_for(lock, std::max<Duration>(watched_ - now, kLookLeast));
    }
  }
}

void Checker::Run(Request*& running) {
  NameThread("attend-check");
  (void)!nice(kNicer);  // on Linux, of this thread; lowering it is never refused
  Lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    std::unique_ptr<Request> request = queue_.TakeNext();
    if (request == nullptr) return;
    running = request.get();
    ++busy_;
    lock.unlock();
    Check(*request);
    lock.lock();
    running = nullptr;
    if (queue_.empty()) queue_.ForgetShares();
    lock.unlock();
    if (request->stop.set()) {
      request->report.reset();
      Fail(*request, StoppedStatus(request->stop_code));
    }
    finish_(std::move(request));
    lock.lock();
    --busy_;
  }
}

void Checker::Check(Request& request) {
  const TraceRange range("attend: check an answer");
  const double budget = request.check_sampled ? options_.sampled_work_budget : options_.work_budget;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const TimePoint begin = clock_.Now();
    const std::vector<RowId> rows =
        SampleRows(request.attention, Mix(options_.seed ^ request.id), budget, &request.stop);
    request.report = CheckRows(request.attention, rows, &request.stop);
    request.report->rows_total = CountRows(request.attention);
    request.check_ns = NanosecondsBetween(begin, clock_.Now());
  } catch (const std::bad_alloc&) {
    request.report.reset();
    Fail(request, ResourceExhausted("there is no memory for the reference check"));
  }
}

}  // namespace attend
