// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/unary_call.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// Made by BeginUnary, deleted when gRPC and the request reader are done with it.
class UnaryCall final : public grpc::ServerUnaryReactor, public Call {
 public:
  UnaryCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format, Pass pass,
            grpc::CallbackServerContext& call, grpc::ByteBuffer& response)
      : context_(context),
        facts_(facts),
        format_(format),
        call_(call),
        response_(response),
        request_(NewRequest(context_, *this, DeadlineOf(context_, call_))),
        id_(request_->id) {
    request_->asked = pass;
    SetCaller(facts_.caller, *request_);
    request_->may_end_in_submit = true;
  }

  void Begin(grpc::ByteBuffer&& message) {
    std::unique_ptr<Request> request = std::move(request_);
    if (!message.Valid()) return EndWithoutMessage(std::move(request));
    context_.reader.Accept(*this, format_, std::move(request), std::move(message));
  }

  void OnQueueing(uint64_t) override {
    context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
    admitted_.store(true, std::memory_order_seq_cst);
  }

  void Finish(std::unique_ptr<Request> request) override {
    WriteFiles(context_.workers, format_, std::move(request),
               [this](std::unique_ptr<Request> written) { Answer(std::move(written)); });
  }

  void Answer(std::unique_ptr<Request> request) {
    const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
    const int64_t bytes = request->status.ok() ? AnswerBytes(*request) : 0;
    span_ = RecordEnd(context_, *request, total_ns, bytes, call_, facts_, format_);
    Status status = request->status;
    if (status.ok()) {
      watched_->Join(context_.answers, call_.c_call());
      watched_->Hold(1);  // until OnDone
      status = OrOutOfMemory([&] {
        response_ = format_.EncodeReply(std::move(request), total_ns, watched_);
        return Status();
      });
    }
    if (status.ok()) return grpc::ServerUnaryReactor::Finish(grpc::Status::OK);
    const Refusal refusal = request == nullptr ? Refusal() : std::move(request->refusal);
    request.reset();  // its memory before the client hears of it and tries again
    AddRefusal(context_, status.code(), refusal, call_);
    grpc::ServerUnaryReactor::Finish(ToGrpc(status));
  }

  std::string Peer() const override { return call_.peer(); }

  void OnCancel() override {
    SetCancelled();
    if (admitted_.load(std::memory_order_seq_cst)) context_.engine.Cancel(id_);
  }

  void OnDone() override {
    watched_->Leave();
    if (unread_ != nullptr) RecordUnread();
    span_.reset();
    if (admitted_.load(std::memory_order_relaxed)) {
      context_.admitted_calls.fetch_sub(1, std::memory_order_release);
    }
    Unref();
  }

  // OnDone and OnCancel are short and wait for nothing, so gRPC may call them where it is. Else it
  // wakes a thread of its executor for every call, which took a quarter of the server's CPU time
  // under small requests.
  bool InternalInlineable() override { return true; }

 private:
  ~UnaryCall() override = default;

  // gRPC hands over a call without a message if its client sent none, and also if the client went,
  // or gRPC cut it off, before the message was whole. Only the first is there to hear an answer;
  // which it was, nobody knows before OnDone.
  void EndWithoutMessage(std::unique_ptr<Request> request) {
    unread_ = std::move(request);
    unread_->status = InvalidArgument("the call has no message");
    grpc::ServerUnaryReactor::Finish(ToGrpc(unread_->status));
  }
  void RecordUnread() {
    if (call_.IsCancelled()) {
      unread_->status = Status(Code::kCancelled, "the call ended before its message was whole");
    }
    RecordEnd(context_, *unread_, NanosecondsBetween(unread_->received, context_.clock.Now()), 0,
              call_, facts_, format_);
  }

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  grpc::CallbackServerContext& call_;
  grpc::ByteBuffer& response_;
  const WatchedRef watched_ = std::make_shared<WatchedCall>();
  std::unique_ptr<Request> request_;  // until Begin
  const uint64_t id_;
  std::atomic<bool> admitted_{false};
  std::unique_ptr<Request> unread_;  // of a call without a message
  std::unique_ptr<OpenSpan> span_;   // while the answer is written
};

}  // namespace

grpc::ServerUnaryReactor* BeginUnary(ServiceContext& context, std::string_view method,
                                     const MessageFormat& format, Pass pass,
                                     grpc::CallbackServerContext& call,
                                     const grpc::ByteBuffer& request, grpc::ByteBuffer& response) {
  UnaryCall* unary = nullptr;
  const Status status = OrOutOfMemory([&]() -> Status {
    const Result<Caller> caller =
        CallerOf(context, call, method, Scope::kCompute, static_cast<int64_t>(request.Length()));
    if (!caller.ok()) return caller.status();
    unary = new UnaryCall(context, FactsOf(context, method, *caller, call), format, pass, call,
                          response);
    return Status();
  });
  if (!status.ok()) {
    grpc::ServerUnaryReactor* const reactor = call.DefaultReactor();
    reactor->Finish(ToGrpc(status));
    return reactor;
  }
  // gRPC keeps its buffer until the call ends; taking it lets the slices go before the kernel runs.
  // The object itself is not const: gRPC made it for this call.
  grpc::ByteBuffer message;
  message.Swap(&const_cast<grpc::ByteBuffer&>(request));
  unary->Begin(std::move(message));
  return unary;
}

}  // namespace attend
