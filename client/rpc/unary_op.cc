// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/unary_op.h"

namespace attend::client {
namespace {

constexpr char kCancelledWaiting[] = "cancelled while waiting to try again";

const std::string& AttendMethod() {
  static const std::string* method = new std::string("/attend.v1.AttentionService/Attend");
  return *method;
}

}  // namespace

UnaryOp::UnaryOp(ConnectionPool* pool, std::shared_ptr<const EncodedCall> call, std::string_view id,
                 const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
                 CallCallback callback)
    : pool_(pool),
      call_(std::move(call)),
      id_(id),
      options_(options),
      deadline_(options.timeout.count() > 0 ? Clock::now() + options.timeout
                                            : Clock::time_point::max()),
      callback_(std::move(callback)),
      retry_(retry, seed) {}

void UnaryOp::Start() {
  connection_ = pool_->Acquire();
  home_ = pool_->at(connection_).loop;
  if (!home_->Add(this)) {
    pool_->Release(connection_);
    CallOutcome outcome;
    outcome.status = Status(Code::kCancelled, "the client is being destroyed");
    callback_(std::move(outcome));
    return;
  }
  const std::lock_guard lock(mutex_);
  self_ = shared_from_this();
  StartAttempt();
}

void UnaryOp::StartAttempt() {
  Connection& connection = pool_->at(connection_);
  reader_.reset();
  context_.emplace();
  NameTenant(options_.tenant, &*context_);
  if (deadline_ != Clock::time_point::max()) {
    context_->set_deadline(DeadlineAfter(deadline_ - Clock::now()));
  }
  reader_ = connection.stub.PrepareUnaryCall(&*context_, AttendMethod(), call_->ToByteBuffer(id_),
                                             connection.loop->queue());
  reader_->StartCall();
  reader_->Finish(&response_, &grpc_status_, finished_.Tag());
  // Cancelled before there was anything to cancel.
  if (cancelled_) context_->TryCancel();
}

bool UnaryOp::ScheduleRetry(Status& status) {
  std::optional<std::chrono::nanoseconds> time_left;
  if (deadline_ != Clock::time_point::max()) time_left = deadline_ - Clock::now();
  const Pushback pushback = PushbackOf(*context_);
  // The server says when to try again. Where it has not, the connection was lost, and the request
  // may still run: one that was tried again would share its place with it.
  const bool placed = call_->outputs().o.has_value() || call_->outputs().lse.has_value();
  if (placed && pushback.kind == Pushback::Kind::kNone) return false;
  const auto wait = retry_.AfterFailure(status.code(), pushback, time_left);
  if (!wait) return false;
  if (cancelled_) {
    // As if it had come a moment later, during the wait.
    status = Status(Code::kCancelled, kCancelledWaiting);
    return false;
  }
  alarm_.emplace();
  alarm_->Set(pool_->at(connection_).loop->queue(), DeadlineAfter(*wait), backoff_.Tag());
  return true;
}

CallOutcome UnaryOp::TakeOutcome(Status status) {
  CallOutcome outcome;
  outcome.connection = connection_;
  outcome.attempts = status.ok() ? retry_.attempts() : std::max(1, retry_.attempts() - 1);
  outcome.status = std::move(status);
  if (outcome.status.ok()) {
    Result<DecodedResponse> decoded = DecodeResponse(
        &response_, options_.payload, [this](const std::string&) { return call_->outputs(); });
    if (decoded.ok()) outcome.status = call_->CheckAnswer(decoded->result);
    if (!decoded.ok()) {
      outcome.status = decoded.status();
    } else if (outcome.status.ok()) {
      outcome.result = std::move(decoded->result);
      outcome.payload_bytes = decoded->payload_bytes;
    }
  }
  // Everything that holds the caller's memory goes before the callback runs.
  reader_.reset();
  context_.reset();
  alarm_.reset();
  call_.reset();
  return outcome;
}

void UnaryOp::OnEvent(int slot, bool ok) {
  std::unique_lock lock(mutex_);
  Status status;
  if (slot == kBackoff) {
    if (ok && !cancelled_) {
      connection_ = pool_->Acquire();
      StartAttempt();
      return;
    }
    status = Status(Code::kCancelled, kCancelledWaiting);
  } else {
    pool_->Release(connection_);
    status = FromGrpc(grpc_status_);
    if (!status.ok() && ScheduleRetry(status)) return;
  }
  CallOutcome outcome = TakeOutcome(std::move(status));
  const std::shared_ptr<UnaryOp> self = std::move(self_);
  lock.unlock();
  End(std::move(outcome));
}

void UnaryOp::End(CallOutcome outcome) {
  const CallCallback callback = std::move(callback_);
  callback(std::move(outcome));
  home_->Remove(this);
}

void UnaryOp::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (context_) context_->TryCancel();
  if (alarm_) alarm_->Cancel();
}

}  // namespace attend::client
