// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/chunked_op.h"

#include <algorithm>
#include <cassert>

#include "client/rpc/op_lock.h"

namespace attend::client {
namespace {

// gRPC counts deadlines in milliseconds on a different clock, so it may see one pass this much
// before ours does. With so little time left a retry would be pointless anyway.
constexpr std::chrono::milliseconds kDeadlineSlack{20};
// A stream for fewer bytes costs more than it gains.
constexpr int64_t kStripeBytesMin = int64_t{4} << 20;

}  // namespace

ChunkedOp::ChunkedOp(ConnectionPool* pool, const EncodedCall& call, std::string_view id,
                     const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
                     std::atomic<bool>* chunks_refused, CallCallback callback)
    : RetryingOp(pool, id, options, retry, seed, std::move(callback)),
      policy_(retry),
      seed_(seed),
      chunks_refused_(chunks_refused),
      call_(call.chunked()),
      as_message_(call.as_message()) {}

void ChunkedOp::Start() {
  if (!Register(pool_->Acquire(options_.server)->loop)) return;
  const OpLock lock(mutex_, home_);
  self_ = shared_from_this();
  StartAttempt();
}

void ChunkedOp::StartAttempt() {
  assert(open_stripes_ == 0 && "streams of the last attempt are open");
  stripes_.clear();
  stripes_.reserve(static_cast<size_t>(pool_->size()));
  grant_.reset();
  answer_.emplace(call_, options_.payload);
  piece_ = {};
  failure_ = Status();
  pushback_ = Pushback();
  refused_lengths_.clear();
  StartStripe(options_.server);
}

void ChunkedOp::StartStripe(const std::string& server) {
  static const std::string* const method =
      new std::string("/attend.v1.AttentionService/AttendChunked");
  Stripe& stripe = *stripes_.emplace_back(std::make_unique<Stripe>());
  stripe.index = static_cast<int>(stripes_.size()) - 1;
  stripe.lease = pool_->Acquire(server);
  stripe.connection = stripe.lease->index;
  for (int kind = 0; kind < kKinds; ++kind) {
    stripe.events[static_cast<size_t>(kind)] = Event{this, stripe.index * kKinds + kind};
  }
  Prepare(stripe.context);
  Connection& to = *stripe.lease;
  stripe.stream = to.stub.PrepareCall(&stripe.context, *method, to.loop->queue());
  ++open_stripes_;
  stripe.stream->StartCall(stripe.events[kStarted].Tag());
  // Cancel may have come before there was a context to cancel.
  if (cancelled_) stripe.context.TryCancel();
}

void ChunkedOp::StartMoreStripes() {
  const int64_t bytes = call_->payload_bytes() + call_->answer_bytes();
  const int64_t stripes =
      std::min({(bytes + kStripeBytesMin - 1) / kStripeBytesMin,
                static_cast<int64_t>(grant_->streams_max()), static_cast<int64_t>(pool_->size())});
  // Only the first stream's server knows the token of the grant.
  const std::string server =
      options_.server.empty() ? pool_->ServerOf(stripes_.front()->context) : options_.server;
  while (static_cast<int64_t>(stripes_.size()) < stripes) StartStripe(server);
}

void ChunkedOp::Perform(Stripe& stripe, const Ops& ops) {
  if (ops.read) stripe.stream->Read(&stripe.incoming, stripe.events[kRead].Tag());
  if (ops.message.Valid()) stripe.stream->Write(ops.message, stripe.events[kWritten].Tag());
  if (ops.half_close) stripe.stream->WritesDone(stripe.events[kWritten].Tag());
}

void ChunkedOp::Write(Stripe& stripe, grpc::ByteBuffer message, Ops* ops) {
  assert(!stripe.writing && !stripe.half_closed && "one write at a time, none after the last");
  stripe.writing = true;
  ops->message.Swap(&message);
}

void ChunkedOp::WriteNext(Stripe& stripe, Ops* ops) {
  if (!stripe.granted || stripe.writing || stripe.half_closed || !failure_.ok()) return;
  if (!call_->Next(std::max<int64_t>(grant_->chunk_bytes_max(), 1), &piece_)) {
    // The first stream stays open: if all joined streams were half-closed before the others join,
    // the server would see missing bytes.
    if (stripe.index == 0) return;
    stripe.half_closed = stripe.writing = ops->half_close = true;
    return;
  }
  Write(stripe, call_->Chunk(piece_), ops);
}

void ChunkedOp::FinishIfOver(Stripe& stripe) {
  if (!stripe.read_over || stripe.writing || stripe.finishing) return;
  stripe.finishing = true;
  stripe.stream->Finish(&stripe.status, stripe.events[kFinished].Tag());
}

void ChunkedOp::NoteFailure(Status status, const Pushback& pushback) {
  // A cancellation is less informative than its cause.
  if (!failure_.ok() &&
      (failure_.code() != Code::kCancelled || status.code() == Code::kCancelled)) {
    return;
  }
  failure_ = std::move(status);
  pushback_ = pushback;
}

void ChunkedOp::CancelStripes() {
  for (const auto& stripe : stripes_) {
    if (!stripe->ended) stripe->context.TryCancel();
  }
}

void ChunkedOp::CancelLatecomers() {
  if (!stripes_.front()->ended || !answer_->complete()) return;
  for (const auto& stripe : stripes_) {
    if (!stripe->granted && !stripe->ended) stripe->context.TryCancel();
  }
}

void ChunkedOp::StripeEnded(Stripe& stripe) {
  assert(!stripe.ended && stripe.read_over && !stripe.writing && "gRPC still holds an event");
  stripe.ended = true;
  --open_stripes_;
  stripe.lease.Release();
  Status status = FromGrpc(stripe.status);
  // A stream that never joined carried no data; the other streams decide the outcome.
  if (status.ok() || (stripe.index > 0 && !stripe.granted)) return;
  std::vector<int64_t> lengths = RefusedLengths(stripe.context);
  if (!lengths.empty()) refused_lengths_ = std::move(lengths);
  NoteFailure(std::move(status), PushbackOf(stripe.context));
  CancelStripes();
}

void ChunkedOp::MessageTaken(Stripe& stripe, Status status, std::optional<v1::ChunkedGrant> grant,
                             Ops* ops) {
  if (!status.ok()) {
    NoteFailure(std::move(status), {});
    CancelStripes();
  }
  if (grant && !stripe.granted) {
    stripe.granted = true;
    const bool first = stripe.index == 0;
    if (first) grant_ = std::move(grant);
    WriteNext(stripe, ops);
    if (first) StartMoreStripes();
  }
  ops->read = true;
}

// The failure of a stream that ended without a grant but that the server may have counted as
// joined, a lost connection first. Other codes mean that the server refused the stream, which then
// never joined.
Status ChunkedOp::UnjoinedFailure() const {
  for (const grpc::StatusCode code :
       {grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::DEADLINE_EXCEEDED,
        grpc::StatusCode::CANCELLED, grpc::StatusCode::RESOURCE_EXHAUSTED,
        grpc::StatusCode::INTERNAL}) {
    for (const auto& stripe : stripes_) {
      if (stripe->status.error_code() == code) return FromGrpc(stripe->status);
    }
  }
  return Status();
}

Status ChunkedOp::AttemptStatus() const {
  assert(open_stripes_ == 0);
  const bool first_ok = stripes_.front()->status.ok();
  if (first_ok && answer_->complete()) return Status();
  const Status failure = failure_.ok() ? UnjoinedFailure() : failure_;
  if (failure.code() == Code::kCancelled && !cancelled_) {
    // Not cancelled here: when a connection is lost, or a deadline passes on one stream, the server
    // cancels the other streams, and that may arrive first.
    if (has_deadline() && time_left() <= kDeadlineSlack) {
      return Status(Code::kDeadlineExceeded, "the deadline passed");
    }
    return Unavailable("a stream of the call was lost: " + failure.message());
  }
  if (!failure.ok()) return failure;
  return Internal("the server ended the call before the whole answer had arrived");
}

std::shared_ptr<UnaryOp> ChunkedOp::MakeMessageOp(Status& status, Remains* remains) {
  if (status.code() != Code::kUnimplemented || grant_ || as_message_ == nullptr) return nullptr;
  if (cancelled_) {
    status = Status(Code::kCancelled, "cancelled before it went on as one message");
    return nullptr;
  }
  CallOptions options = options_;
  if (has_deadline()) {
    options.timeout = std::max(time_left(), std::chrono::nanoseconds(1));
  }
  const int attempts = retry_.attempts();
  auto finish = [self = std::static_pointer_cast<ChunkedOp>(self_), attempts](CallOutcome outcome) {
    outcome.attempts += attempts;
    // A server without a kernel for the call answers UNIMPLEMENTED to both forms, so only success
    // shows that AttendChunked itself is unknown.
    if (outcome.status.ok()) self->chunks_refused_->store(true, std::memory_order_relaxed);
    self->EndCall(std::move(outcome));
  };
  message_op_ = std::make_shared<UnaryOp>(pool_, std::move(as_message_), id_, options, policy_,
                                          seed_, std::move(finish));
  stripes_.clear();
  answer_.reset();
  remains->call = std::move(call_);
  return message_op_;
}

CallOutcome ChunkedOp::TakeOutcome(Status status, Remains* remains) {
  CallOutcome outcome =
      OutcomeOf(std::move(status), stripes_.front()->connection, &stripes_.front()->context);
  if (outcome.status.ok()) {
    DecodedResponse response = answer_->TakeResponse();
    outcome.result = std::move(response.result);
    outcome.payload_bytes = response.payload_bytes;
  } else {
    outcome.result.session_lengths = std::move(refused_lengths_);
  }
  stripes_.clear();
  answer_.reset();
  alarm_.reset();
  *remains = {std::move(call_), std::move(as_message_)};
  return outcome;
}

void ChunkedOp::OnEvent(int slot, bool ok) {
  std::shared_ptr<Operation> self;
  Remains remains;
  OpLock lock(mutex_);
  assert(self_ != nullptr && "an event came after the last");
  Status status;
  if (slot == kBackoff) {
    if (ok && !cancelled_) return StartAttempt();
    status = CancelledWaiting();
  } else {
    Stripe& stripe = *stripes_[static_cast<size_t>(slot / kKinds)];
    Ops ops;
    switch (slot % kKinds) {
      case kStarted:
        ops.read = true;
        Write(stripe, stripe.index == 0 ? call_->Header(id_) : TokenMessage(grant_->token()), &ops);
        break;
      case kWritten:
        stripe.writing = false;
        stripe.half_closed |= !ok;
        WriteNext(stripe, &ops);
        break;
      case kRead:
        if (ok) {
          ChunkedAnswer& answer = *answer_;  // not reset while gRPC holds events
          std::optional<v1::ChunkedGrant> grant;
          lock.Unlock();  // Take copies bytes
          Status taken = answer.Take(&stripe.incoming, &grant);
          lock.Lock();
          MessageTaken(stripe, std::move(taken), std::move(grant), &ops);
        } else {
          stripe.read_over = true;
        }
        break;
      default:
        StripeEnded(stripe);
        break;
    }
    FinishIfOver(stripe);
    CancelLatecomers();
    if (open_stripes_ > 0) {
      lock.Unlock();
      return Perform(stripe, ops);
    }
    status = AttemptStatus();
    if (const std::shared_ptr<UnaryOp> message_op = MakeMessageOp(status, &remains)) {
      self = std::move(self_);
      lock.Unlock();
      remains = {};
      return message_op->Start();
    }
    if (!status.ok() && ScheduleRetry(status, pushback_)) return;
  }
  CallOutcome outcome = TakeOutcome(std::move(status), &remains);
  self = std::move(self_);
  lock.Unlock();
  // Everything that holds the caller's memory is released before the callback runs.
  remains = {};
  EndCall(std::move(outcome));
}

void ChunkedOp::EndCall(CallOutcome outcome) {
  std::shared_ptr<UnaryOp> message_op;  // may own this operation
  {
    const MutexLock lock(mutex_);
    message_op.swap(message_op_);
  }
  End(std::move(outcome));
}

void ChunkedOp::Cancel() {
  RetryingOp::Cancel();
  std::shared_ptr<UnaryOp> message_op;
  {
    const MutexLock lock(mutex_);
    message_op = message_op_;
  }
  if (message_op != nullptr) message_op->Cancel();
}

void ChunkedOp::CancelAttempt() {
  const OpLock lock(mutex_);
  CancelStripes();
  if (alarm_) alarm_->Cancel();
}

}  // namespace attend::client
