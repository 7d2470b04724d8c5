// SPDX-License-Identifier: Apache-2.0

#include "server/checker.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kernels/thread_name.h"
#include "kernels/trace_range.h"

namespace attend {
namespace {

// Where all cores are busy, checks take what serving leaves, and some 10 % of a core besides. They
// also answer at that priority, as who waits for a check waits for the rest too.
constexpr int kNicer = 10;

// SplitMix64 (Steele, Lea & Flood 2014): well-mixed bits of a counter.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

Checker::Checker(const CheckerOptions& options, const Clock& clock,
                 std::function<void(std::unique_ptr<Request>)> finish)
    : options_(options), clock_(clock), finish_(std::move(finish)) {
  for (int i = 0; i < std::max(1, options_.threads); ++i) {
    threads_.emplace_back([this] { Run(); });
  }
}

Checker::~Checker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool Checker::Sampled(uint64_t id) const {
  if (options_.sample <= 0) return false;
  const double draw = static_cast<double>(Mix(options_.seed ^ Mix(id)) >> 11) * 0x1p-53;
  return draw < options_.sample;
}

bool Checker::HasRoom() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(posted_.size()) + running_ < options_.backlog_max;
}

void Checker::Post(std::unique_ptr<Request> request) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(request));
  }
  wake_.notify_one();
}

void Checker::Run() {
  NameThread("attend-check");
  (void)!nice(kNicer);  // on Linux, of this thread; lowering it is never refused
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !posted_.empty(); });
    if (posted_.empty()) return;
    std::unique_ptr<Request> request = std::move(posted_.front());
    posted_.pop_front();
    ++running_;
    lock.unlock();
    Check(std::move(request));
    lock.lock();
    --running_;
  }
}

void Checker::Check(std::unique_ptr<Request> request) {
  const TimePoint begin = clock_.Now();
  if (request->deadline <= begin) {
    // Nobody waits for this answer any more.
    request->status = Status(Code::kDeadlineExceeded,
                             "the deadline passed while the answer waited for its check");
    finish_(std::move(request));
    return;
  }
  const TraceRange range("attend: check an answer");
  const double budget =
      request->check_sampled ? options_.sampled_work_budget : options_.work_budget;
  const std::vector<RowId> rows =
      SampleRows(request->attention, Mix(options_.seed ^ request->id), budget);
  request->report = CheckRows(request->attention, rows, request->o_roundings);
  request->report->rows_total = CountRows(request->attention);
  request->check_ns = NanosecondsBetween(begin, clock_.Now());
  finish_(std::move(request));
}

}  // namespace attend
