// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/unary_op.h"

#include <cassert>

#include "client/rpc/op_lock.h"

namespace attend::client {

UnaryOp::UnaryOp(ConnectionPool* pool, std::shared_ptr<const EncodedCall> call, std::string_view id,
                 const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
                 CallCallback callback)
    : RetryingOp(pool, id, options, retry, seed, std::move(callback)), call_(std::move(call)) {}

void UnaryOp::Start() {
  Lease lease = pool_->Acquire(options_.server);
  if (!Register(lease->loop)) return;
  const OpLock lock(mutex_, home_);
  lease_ = std::move(lease);
  self_ = shared_from_this();
  StartAttempt();
}

void UnaryOp::StartAttempt() {
  static const std::string* const attend = new std::string("/attend.v1.AttentionService/Attend");
  static const std::string* const backward =
      new std::string("/attend.v1.AttentionService/Backward");
  const std::string* const method = call_->backward() ? backward : attend;
  connection_ = lease_->index;
  reader_.reset();
  context_.emplace();
  Prepare(*context_);
  reader_ = lease_->stub.PrepareUnaryCall(&*context_, *method, call_->ToByteBuffer(id_),
                                          lease_->loop->queue());
  reader_->StartCall();
  reader_->Finish(&response_, &grpc_status_, finished_.Tag());
  // Cancel may have come before there was a context to cancel.
  if (cancelled_) context_->TryCancel();
}

bool UnaryOp::TriesAgain(Status& status) {
  const Pushback pushback = PushbackOf(*context_);
  // A pushback means that the server has ended the request. Without one the connection was lost,
  // and the request may still be writing to the place that a retry would use.
  if (call_->outputs().any() && pushback.kind == Pushback::Kind::kNone) return false;
  return ScheduleRetry(status, pushback);
}

UnaryOp::Remains UnaryOp::TakeRemains(Status status) {
  Remains remains;
  CallOutcome& outcome = remains.outcome;
  outcome = OutcomeOf(std::move(status), connection_, context_ ? &*context_ : nullptr);
  if (!outcome.status.ok() && context_) outcome.result.session_lengths = RefusedLengths(*context_);
  remains.response.Swap(&response_);
  remains.call = std::move(call_);
  reader_.reset();
  context_.reset();
  alarm_.reset();
  return remains;
}

CallOutcome UnaryOp::Decode(Remains* remains) const {
  CallOutcome outcome = std::move(remains->outcome);
  if (!outcome.status.ok()) return outcome;
  const EncodedCall& call = *remains->call;
  Result<DecodedResponse> decoded = DecodeResponse(
      &remains->response, options_.payload, [&call](const std::string&) { return call.outputs(); });
  outcome.status = decoded.ok() ? call.CheckAnswer(decoded->result) : decoded.status();
  if (!outcome.status.ok()) return outcome;
  outcome.result = std::move(decoded->result);
  outcome.payload_bytes = decoded->payload_bytes;
  return outcome;
}

void UnaryOp::OnEvent(int slot, bool ok) {
  std::shared_ptr<Operation> self;
  OpLock lock(mutex_);
  assert(self_ != nullptr && "an event came after the last");
  Status status;
  if (slot == kBackoff) {
    if (ok && !cancelled_) {
      lease_ = pool_->Acquire(options_.server);
      StartAttempt();
      return;
    }
    status = CancelledWaiting();
  } else {
    lease_.Release();
    status = FromGrpc(grpc_status_);
    if (!status.ok() && TriesAgain(status)) return;
  }
  Remains remains = TakeRemains(std::move(status));
  self = std::move(self_);
  lock.Unlock();
  CallOutcome outcome = Decode(&remains);
  // Everything that holds the caller's memory is released before the callback runs.
  remains = {};
  End(std::move(outcome));
}

void UnaryOp::CancelAttempt() {
  const OpLock lock(mutex_);
  if (context_) context_->TryCancel();
  if (alarm_) alarm_->Cancel();
}

}  // namespace attend::client
