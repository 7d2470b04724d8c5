// SPDX-License-Identifier: Apache-2.0

#include "client/tool/verify.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "client/call/backward_call.h"
#include "client/call/tree_mask.h"
#include "kernels/contract/select.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/util/thread_name.h"

namespace attend::client {

Result<RowsReport> VerifyAnswer(const AttentionCall& call, const AttentionResult& result,
                                uint64_t seed, double work_budget) {
  if (call.backward) {
    const Result<DescribedBackward> described = DescribeBackward(call, result);
    if (!described.ok()) return described.status();
    return CheckGradients(described->attention, described->gradients, seed, work_budget, nullptr,
                          RoundsWeights(result.kernel));
  }
  if (call.return_lse != result.lse.has_value()) {
    return Internal(call.return_lse ? "the answer has no lse"
                                    : "the answer has an lse that was not requested");
  }
  const Result<AttentionCall> written = WithTreeAsBias(call);
  if (!written.ok()) return written.status();
  const Result<Attention> attention =
      Describe(*written, &result.o, result.lse ? &*result.lse : nullptr);
  if (!attention.ok()) return attention.status();
  return CheckRows(*attention, SampleRows(*attention, seed, work_budget), nullptr,
                   RoundsWeights(result.kernel));
}

VerifyQueue::VerifyQueue(int64_t bytes_max) : bytes_max_(bytes_max), thread_([this] { Run(); }) {}

VerifyQueue::~VerifyQueue() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

void VerifyQueue::Add(const AttentionCall& call, AttentionResult result, uint64_t seed) {
  int64_t bytes = 1024;
  for (const AnswerTensor& each : AnswerTensors(call)) {
    if (const HostTensor* const tensor = TensorOf(result, each.name)) bytes += tensor->bytes;
  }
  const MutexLock lock(mutex_);
  // One answer is accepted whatever its size.
  if (!entries_.empty() && bytes_ + bytes > bytes_max_) {
    ++counts_.skipped;
    return;
  }
  bytes_ += bytes;
  entries_.push_back({&call, std::move(result), seed, bytes});
  if (bytes_ > bytes_max_ / 2) changed_.NotifyAll();
}

VerifyQueue::Entry VerifyQueue::TakeFrontLocked() {
  Entry entry = std::move(entries_.front());
  entries_.pop_front();
  ++busy_;
  return entry;
}

void VerifyQueue::EndLocked(const Entry& entry, const Result<RowsReport>& report) {
  --busy_;
  bytes_ -= entry.bytes;
  if (entries_.empty()) changed_.NotifyAll();
  if (report.ok() && report->ok) {
    ++counts_.passed;
  } else if (report.ok() && report->undecided) {
    ++counts_.skipped;
  } else {
    ++counts_.failed;
    if (counts_.first_failure.empty()) {
      counts_.first_failure = "request " + entry.result.request_id + ": " +
                              (report.ok() ? report->detail : report.status().ToString());
    }
  }
  if (report.ok() && report->bound > 0) {
    counts_.worst_ratio = std::max(counts_.worst_ratio, report->max_abs_error / report->bound);
  }
}

void VerifyQueue::Run() {
  NameThread("attend-verify");
  // For this thread only, so that it does not disturb the measurement.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  MutexLock lock(mutex_);
  for (;;) {
    while (!stop_ && (entries_.empty() || (!draining_ && bytes_ <= bytes_max_ / 2))) {
      changed_.Wait(mutex_);
    }
    if (stop_) return;
    const Entry entry = TakeFrontLocked();
    lock.Unlock();
    const Result<RowsReport> report = VerifyAnswer(*entry.call, entry.result, entry.seed);
    lock.Lock();
    EndLocked(entry, report);
  }
}

VerifyQueue::Counts VerifyQueue::Drain() {
  MutexLock lock(mutex_);
  draining_ = true;
  changed_.NotifyAll();
  // The caller is not measuring now, so it helps: the low-priority thread may starve on a busy
  // machine.
  while (!entries_.empty()) {
    const Entry entry = TakeFrontLocked();
    lock.Unlock();
    const Result<RowsReport> report = VerifyAnswer(*entry.call, entry.result, entry.seed);
    lock.Lock();
    EndLocked(entry, report);
  }
  while (!entries_.empty() || busy_ > 0) changed_.Wait(mutex_);
  draining_ = false;
  return std::exchange(counts_, Counts());
}

void VerifyQueue::Drop() {
  const MutexLock lock(mutex_);
  counts_.skipped += static_cast<int64_t>(entries_.size());
  for (const Entry& entry : entries_) bytes_ -= entry.bytes;
  entries_.clear();
}

}  // namespace attend::client
