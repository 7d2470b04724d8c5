// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/unary_call.h"

#include <thread>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"

namespace attend {

CallHandler* UnaryCall::Begin(ServiceContext& context, std::string_view method,
                              const CallTable::Data& data, ServerCall& call) {
  auto* const unary = new UnaryCall(context, method, data, call);
  const Status status = OrOutOfMemory([&] { return unary->Admit(); });
  status.ok() ? unary->wire_.Read() : unary->wire_.End(status);
  return unary;
}

Status UnaryCall::Admit() {
  Result<Caller> caller = CallerOf(context_, wire_, method_, Scope::kCompute, /*came=*/0);
  if (caller.ok()) facts_.caller = std::move(*caller);
  return caller.status();
}

std::unique_ptr<Request> UnaryCall::MakeRequest() {
  begun_ = true;
  std::unique_ptr<Request> request;
  const bool made = TryAllocating([&] {
    facts_ = FactsOf(context_, method_, facts_.caller, wire_);
    request = NewRequest(context_, *this, wire_.Deadline());
  });
  if (!made) {
    wire_.End(OutOfMemory());
    return nullptr;
  }
  id_ = request->id;
  request->asked = data_.pass;
  SetCaller(facts_.caller, *request);
  request->may_end_in_submit = true;
  request->planner = std::this_thread::get_id();
  return request;
}

// Further messages are read and dropped, so that none is kept.
void UnaryCall::OnMessage(InMessage message) {
  wire_.Read();
  if (begun_) return;
  std::unique_ptr<Request> request = MakeRequest();
  if (request == nullptr) return;
  context_.reader.Accept(*this, *data_.format, std::move(request), std::move(message));
}

std::shared_ptr<MessagePlaces> UnaryCall::Place(std::span<const MessagePiece> begun,
                                                int64_t bytes) {
  if (begun_) return nullptr;
  return context_.reader.Place(*data_.format, facts_.caller.tenant, begun, bytes);
}

void UnaryCall::OnHalfClose() {
  if (begun_) return;
  unread_ = MakeRequest();
  if (unread_ == nullptr) return;
  unread_->status = InvalidArgument("the call has no message");
  wire_.End(unread_->status);
}

void UnaryCall::OnQueueing(uint64_t) {
  context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
  admitted_.store(true, std::memory_order_seq_cst);
}

void UnaryCall::Finish(std::unique_ptr<Request> request) {
  WriteFiles(context_.workers, *data_.format, std::move(request),
             [this](std::unique_ptr<Request> written) { Answer(std::move(written)); });
}

void UnaryCall::Answer(std::unique_ptr<Request> request) {
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  const int64_t bytes = request->status.ok() ? AnswerBytes(*request) : 0;
  span_ = RecordEnd(context_, *request, total_ns, bytes, wire_, facts_, *data_.format);
  Status status = request->status;
  if (status.ok()) {
    watched_->Join(context_.answers, wire_);
    watched_->Hold(1);  // until OnDone
    OutMessage answer;
    status = OrOutOfMemory([&] {
      answer = data_.format->EncodeReply(std::move(request), total_ns, watched_);
      return Status();
    });
    if (status.ok()) {
      wire_.Write(std::move(answer));
      return wire_.End(Status());
    }
  }
  const Refusal refusal = request == nullptr ? Refusal() : std::move(request->refusal);
  request.reset();  // frees its memory before the client learns of the failure and retries
  AddRefusal(context_, status.code(), refusal, wire_);
  wire_.End(status);
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

void UnaryCall::RecordUnread() {
  if (wire_.Cancelled()) {
    unread_->status = Status(Code::kCancelled, "the call ended before its message was complete");
  }
  RecordEnd(context_, *unread_, NanosecondsBetween(unread_->received, context_.clock.Now()), 0,
            wire_, facts_, *data_.format);
}

}  // namespace attend
