// SPDX-License-Identifier: Apache-2.0
//
// The client's own check of an answer, O or gradients, against double precision on this machine: a
// seeded sample of rows, or all rows if that is cheap. LSE is judged if the call returns it.
// VerifyQueue runs it in the background of a measurement.

#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "client/call/attention_call.h"
#include "kernels/reference/check_rows.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// Multiply-adds that one verification may take; about a second at most.
inline constexpr double kVerifyBudget = 5e7;

Result<RowsReport> VerifyAnswer(const AttentionCall& call, const AttentionResult& result,
                                uint64_t seed, double work_budget = kVerifyBudget);

// Verifies on a low-priority thread. In order not to disturb a running measurement, the thread
// sleeps until the queue exceeds half of its memory bound, or until Drain.
class VerifyQueue {
 public:
  struct Counts {
    int64_t passed = 0;
    int64_t failed = 0;
    int64_t skipped = 0;     // the memory bound was reached, or the answer cannot be judged
    double worst_ratio = 0;  // largest max_abs_error / bound
    std::string first_failure;
  };

  explicit VerifyQueue(int64_t bytes_max);
  // Drops unverified answers.
  ~VerifyQueue();

  // Queues the answer to `call`, which must outlive the queue. Any thread.
  void Add(const AttentionCall& call, AttentionResult result, uint64_t seed);
  // Verifies all queued answers; returns the counts since the last Drain.
  Counts Drain();
  // Drops unverified answers and counts them as skipped.
  void Drop();

 private:
  struct Entry {
    const AttentionCall* call;
    AttentionResult result;
    uint64_t seed;
    int64_t bytes;
  };
  void Run();
  // Takes the first entry, to be verified without the lock.
  Entry TakeFrontLocked() ATTEND_REQUIRES(mutex_);
  void EndLocked(const Entry& entry, const Result<RowsReport>& report) ATTEND_REQUIRES(mutex_);

  const int64_t bytes_max_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Entry> entries_ ATTEND_GUARDED_BY(mutex_);
  int64_t bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  int busy_ ATTEND_GUARDED_BY(mutex_) = 0;  // threads verifying an entry
  bool draining_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  Counts counts_ ATTEND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace attend::client
