// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/unary_call.h"

#include <thread>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/wire/grpc_status.h"

namespace attend {

UnaryCall::UnaryCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
                     Pass pass, UnaryWire& wire)
    : context_(context),
      facts_(facts),
      format_(format),
      wire_(wire),
      request_(NewRequest(context_, *this, wire_.call().Deadline(context_.clock))),
      id_(request_->id) {
  request_->asked = pass;
  SetCaller(facts_.caller, *request_);
  request_->may_end_in_submit = true;
  if (wire_.call().PlansNow()) request_->planner = std::this_thread::get_id();
}

void UnaryCall::Begin(const ArrivedMessage& message) {
  std::unique_ptr<Request> request = std::move(request_);
  if (!message.Valid()) return EndWithoutMessage(std::move(request));
  context_.reader.Accept(*this, format_, std::move(request), message);
}

void UnaryCall::OnQueueing(uint64_t) {
  context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
  admitted_.store(true, std::memory_order_seq_cst);
}

void UnaryCall::Finish(std::unique_ptr<Request> request) {
  WriteFiles(context_.workers, format_, std::move(request),
             [this](std::unique_ptr<Request> written) { Answer(std::move(written)); });
}

void UnaryCall::Answer(std::unique_ptr<Request> request) {
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  const int64_t bytes = request->status.ok() ? AnswerBytes(*request) : 0;
  span_ = RecordEnd(context_, *request, total_ns, bytes, wire_.call(), facts_, format_);
  Status status = request->status;
  if (status.ok()) {
    watched_->Join(context_.answers, wire_.call());
    watched_->Hold(1);  // until OnDone
    grpc::ByteBuffer answer;
    status = OrOutOfMemory([&] {
      grpc::ByteBuffer made = format_.EncodeReply(std::move(request), total_ns, watched_);
      answer.Swap(&made);  // the only way without a copy
      return Status();
    });
    if (status.ok()) return wire_.Answer(std::move(answer));
  }
  const Refusal refusal = request == nullptr ? Refusal() : std::move(request->refusal);
  request.reset();  // its memory before the client hears of it and tries again
  AddRefusal(context_, status.code(), refusal, wire_.call());
  wire_.Fail(ToGrpc(status));
}

void UnaryCall::OnCancel() {
  SetCancelled();
  if (admitted_.load(std::memory_order_seq_cst)) context_.engine.Cancel(id_);
}

void UnaryCall::OnDone() {
  watched_->Leave();
  if (unread_ != nullptr) RecordUnread();
  span_.reset();
  if (admitted_.load(std::memory_order_relaxed)) {
    context_.admitted_calls.fetch_sub(1, std::memory_order_release);
  }
  Unref();
}

void UnaryCall::EndWithoutMessage(std::unique_ptr<Request> request) {
  unread_ = std::move(request);
  unread_->status = InvalidArgument("the call has no message");
  wire_.Fail(ToGrpc(unread_->status));
}

void UnaryCall::RecordUnread() {
  if (wire_.call().Cancelled()) {
    unread_->status = Status(Code::kCancelled, "the call ended before its message was whole");
  }
  RecordEnd(context_, *unread_, NanosecondsBetween(unread_->received, context_.clock.Now()), 0,
            wire_.call(), facts_, format_);
}

}  // namespace attend
