// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/retrying_op.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace attend::client {
namespace {

TimePoint EndOf(std::chrono::nanoseconds timeout, TimePoint begin) {
  return timeout.count() <= 0 || timeout > kNever - begin ? kNever : begin + timeout;
}

}  // namespace

RetryingOp::RetryingOp(ConnectionPool* pool, std::string_view id, const CallOptions& options,
                       const RetryPolicy& retry, uint64_t seed, CallCallback callback)
    : pool_(pool),
      id_(id),
      options_(options),
      deadline_(EndOf(options.timeout, pool->clock().Now())),
      callback_(std::move(callback)),
      retry_(retry, seed) {}

bool RetryingOp::Register(CompletionLoop* loop) {
  assert(home_ == nullptr && "a call was started twice");
  home_ = loop;
  if (home_->Add(this)) return true;
  const CallCallback callback = std::exchange(callback_, nullptr);
  callback({.status = Status(Code::kCancelled, "the client is being destroyed")});
  return false;
}

void RetryingOp::Cancel() {
  const MutexLock lock(mutex_);
  cancelled_ = true;
  // home_ is valid while the operation has not ended.
  if (self_ == nullptr) return;
  home_->Post([this, self = self_] { CancelAttempt(); });
}

void RetryingOp::Prepare(grpc::ClientContext& context) const {
  pool_->Introduce(options_.tenant, options_.traceparent, &context);
  if (has_deadline()) context.set_deadline(DeadlineAfter(time_left()));
}

bool RetryingOp::ScheduleRetry(Status& status, const Pushback& pushback) {
  const auto left = has_deadline() ? std::optional(time_left()) : std::nullopt;
  const auto wait = retry_.AfterFailure(status.code(), pushback, left);
  if (!wait) return false;
  if (cancelled_) {
    // As if Cancel had come a moment later, during the wait.
    status = CancelledWaiting();
    return false;
  }
  assert(self_ != nullptr && "nothing would keep it alive until the wait's end");
  alarm_.emplace();
  alarm_->Set(home_->queue(), DeadlineAfter(*wait), backoff_.Tag());
  return true;
}

Status RetryingOp::CancelledWaiting() {
  return Status(Code::kCancelled, "cancelled while waiting to retry");
}

CallOutcome RetryingOp::OutcomeOf(Status status, int connection,
                                  const grpc::ClientContext* context) const {
  CallOutcome outcome;
  outcome.connection = connection;
  if (context != nullptr) outcome.server_id = ServerIdOf(*context);
  // Older servers send no name.
  if (!outcome.server_id.empty() || (context != nullptr && status.ok())) {
    outcome.server = pool_->ServerOf(*context);
  }
  if (context != nullptr && !status.ok()) {
    outcome.retry_after_ms =
        std::chrono::ceil<std::chrono::milliseconds>(PushbackOf(*context).wait).count();
  }
  outcome.attempts = status.ok() ? retry_.attempts() : std::max(1, retry_.attempts() - 1);
  outcome.status = std::move(status);
  return outcome;
}

void RetryingOp::End(CallOutcome outcome) {
  assert(callback_ != nullptr && "a call ended twice");
  const CallCallback callback = std::exchange(callback_, nullptr);
  callback(std::move(outcome));
  home_->Remove(this);
}

}  // namespace attend::client
