// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the common part of operations that retry. Such an operation owns itself
// from Start until its callback has returned; events come on completion threads, Cancel from any
// thread.

#pragma once

#include <grpcpp/alarm.h>

#include <cassert>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "client/call/call_options.h"
#include "client/call/retry_policy.h"
#include "client/rpc/connections.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"

namespace attend::client {

class RetryingOp : public Operation {
 public:
  void Cancel() override;

 protected:
  static constexpr int kBackoff = -1;  // the slot of the backoff alarm

  RetryingOp(ConnectionPool* pool, std::string_view id, const CallOptions& options,
             const RetryPolicy& retry, uint64_t seed, CallCallback callback);
  // Every call has ended, exactly once.
  ~RetryingOp() override { assert(callback_ == nullptr); }

  // Registers the operation with the loop. False: the client is being destroyed; the callback has
  // run.
  bool Register(CompletionLoop* loop);

  bool has_deadline() const { return deadline_ != kNever; }
  std::chrono::nanoseconds time_left() const { return deadline_ - pool_->clock().Now(); }
  // Cancels the attempt or the backoff. Runs on the home loop's thread.
  virtual void CancelAttempt() = 0;
  // Sets metadata and deadline of an attempt that begins now.
  void Prepare(grpc::ClientContext& context) const;

  // Starts the backoff before another attempt, if the failure allows one. False: the call ends with
  // `status`.
  bool ScheduleRetry(Status& status, const Pushback& pushback) ATTEND_REQUIRES(mutex_);
  // The status of a call cancelled during the backoff.
  static Status CancelledWaiting();
  // The outcome without an answer. `context`: of the last attempt, which has ended; null if there
  // was none.
  CallOutcome OutcomeOf(Status status, int connection, const grpc::ClientContext* context) const
      ATTEND_REQUIRES(mutex_);

  // Runs the callback. To be called once, last.
  void End(CallOutcome outcome) ATTEND_EXCLUDES(mutex_);

  ConnectionPool* const pool_;
  const std::string id_;
  const CallOptions options_;
  const TimePoint deadline_;
  CallCallback callback_;
  CompletionLoop* home_ = nullptr;  // the loop where it is registered
  Event backoff_{this, kBackoff};

  Mutex mutex_;
  std::shared_ptr<Operation> self_ ATTEND_GUARDED_BY(mutex_);  // while gRPC holds an event
  RetryState retry_ ATTEND_GUARDED_BY(mutex_);
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Alarm> alarm_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
