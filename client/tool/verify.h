// SPDX-License-Identifier: Apache-2.0
//
// The client's own check of an answer, O or gradients, against double precision on this machine: a
// seeded sample of rows, all of them where that is cheap. LSE is judged if the call returns it.
// VerifyQueue does it aside from what is being measured.

#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "client/call/attention_call.h"
#include "kernels/reference/check_rows.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// Multiply-adds that one verification may spend; about a second at the very most.
inline constexpr double kVerifyBudget = 5e7;

Result<RowsReport> VerifyAnswer(const AttentionCall& call, const AttentionResult& result,
                                uint64_t seed, double work_budget = kVerifyBudget);

// Verifies on a thread of low priority. To leave a running measurement alone it waits until it
// holds half the memory it may hold, or until Drain.
class VerifyQueue {
 public:
  struct Counts {
    int64_t passed = 0;
    int64_t failed = 0;
    int64_t skipped = 0;     // no room, as the memory bound was reached; or it cannot be judged
    double worst_ratio = 0;  // largest max_abs_error / bound
    std::string first_failure;
  };

  explicit VerifyQueue(int64_t bytes_max);
  // Drops what is not verified yet.
  ~VerifyQueue();

  // Takes the answer to `call`, which must outlive the queue. Any thread.
  void Add(const AttentionCall& call, AttentionResult result, uint64_t seed);
  // Verifies everything there is; then the counts since the last Drain.
  Counts Drain();
  // Drops what is not verified yet, as skipped.
  void Drop();

 private:
  struct Entry {
    const AttentionCall* call;
    AttentionResult result;
    uint64_t seed;
    int64_t bytes;
  };
  void Run();
  // The first entry, which is verified without the lock.
  Entry TakeFrontLocked() ATTEND_REQUIRES(mutex_);
  void EndLocked(const Entry& entry, const Result<RowsReport>& report) ATTEND_REQUIRES(mutex_);

  const int64_t bytes_max_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Entry> entries_ ATTEND_GUARDED_BY(mutex_);
  int64_t bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  int busy_ ATTEND_GUARDED_BY(mutex_) = 0;  // threads that verify an entry
  bool draining_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  Counts counts_ ATTEND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace attend::client
