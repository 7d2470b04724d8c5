// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/unary_call.h"

#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"

namespace attend {

void UnaryCall::Add(CallTable& table, const char* method, const MessageFormat& format, Pass pass) {
  ServiceContext& context = table.context();
  table.AddLarge(method, [&context, method, &format, pass](ServerCall& call) {
    UnaryCall* const unary =
        Own(std::shared_ptr<UnaryCall>(new UnaryCall(context, method, format, pass, call)));
    const Status status = OrOutOfMemory([&] { return unary->Admit(); });
    status.ok() ? unary->wire_.Read() : unary->wire_.End(status);
    return unary;
  });
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
    request = NewRequest(context_, *this, wire_.Deadline(), facts_.caller);
  });
  if (!made) {
    wire_.End(OutOfMemory());
    return nullptr;
  }
  id_ = request->id;
  request->asked = pass_;
  return request;
}

// Further messages are read and dropped, so that none is kept.
void UnaryCall::OnMessage(InMessage message) {
  wire_.Read();
  if (begun_) return;
  std::unique_ptr<Request> request = MakeRequest();
  if (request == nullptr) return;
  context_.reader.Accept(Ref(this), format_, std::move(request), std::move(message));
}

std::shared_ptr<MessagePlaces> UnaryCall::Place(std::span<const MessagePiece> begun,
                                                int64_t bytes) {
  if (begun_) return nullptr;
  return context_.reader.Place(format_, facts_.caller.tenant, begun, bytes);
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
  WriteFiles(context_.workers, format_, std::move(request),
             [this](std::unique_ptr<Request> written) { Answer(std::move(written)); });
}

void UnaryCall::Answer(std::unique_ptr<Request> request) {
  RequestEnd end = EndRequest(context_, std::move(request), wire_, facts_, format_);
  span_ = std::move(end.span);
  if (end.status.ok()) {
    wire_.Write(std::move(end.answer));
  } else {
    AddRefusal(context_, end.status.code(), end.refusal, wire_);
  }
  wire_.End(end.status);
}

void UnaryCall::OnCancel() {
  SetCancelled();
  if (admitted_.load(std::memory_order_seq_cst)) context_.engine.Cancel(id_);
}

void UnaryCall::OnDone() {
  if (unread_ != nullptr) RecordUnread();
  span_.reset();
  if (admitted_.load(std::memory_order_relaxed)) {
    context_.admitted_calls.fetch_sub(1, std::memory_order_release);
  }
  SharedHandler::OnDone();
}

void UnaryCall::RecordUnread() {
  if (wire_.Cancelled()) {
    unread_->status = Status(Code::kCancelled, "the call ended before its message was complete");
  }
  RecordEnd(context_, *unread_, NanosecondsBetween(unread_->received, context_.clock.Now()), 0,
            wire_, facts_, format_);
}

}  // namespace attend
