// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/grpc_data.h"

#include <memory>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/data_wire.h"
#include "server/rpc/unary_call.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

class GrpcUnary final : public grpc::ServerUnaryReactor, public UnaryWire {
 public:
  GrpcUnary(grpc::CallbackServerContext& call, grpc::ByteBuffer& response)
      : call_(call), response_(response) {}

  void Give(UnaryHandler& handler) { handler_ = &handler; }

  const WireCall& call() const override { return call_; }
  void Answer(grpc::ByteBuffer&& answer) override {
    response_.Swap(&answer);
    Finish(grpc::Status::OK);
  }
  void Fail(const grpc::Status& status) override { Finish(status); }

  void OnCancel() override {
    if (handler_ != nullptr) handler_->OnCancel();
  }
  void OnDone() override {
    if (handler_ != nullptr) handler_->OnDone();
    delete this;
  }
  // OnDone and OnCancel are short and wait for nothing, so gRPC may call them where it is. Else it
  // wakes a thread of its executor for every call, which took a quarter of the server's CPU time
  // under small requests.
  bool InternalInlineable() override { return true; }

 private:
  const GrpcWire call_;
  grpc::ByteBuffer& response_;
  UnaryHandler* handler_ = nullptr;  // null: it was refused
};

}  // namespace

grpc::ServerUnaryReactor* BeginGrpcUnary(ServiceContext& context, std::string_view method,
                                         const MessageFormat& format, Pass pass,
                                         grpc::CallbackServerContext& call,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response) {
  std::unique_ptr<GrpcUnary> wire;
  UnaryCall* unary = nullptr;
  const Status status = OrOutOfMemory([&]() -> Status {
    wire = std::make_unique<GrpcUnary>(call, response);
    const Result<Caller> caller = CallerOf(context, wire->call(), method, Scope::kCompute,
                                           static_cast<int64_t>(request.Length()));
    if (!caller.ok()) return caller.status();
    unary = new UnaryCall(context, FactsOf(context, method, *caller, wire->call()), format, pass,
                          *wire);
    return Status();
  });
  if (!status.ok()) {
    grpc::ServerUnaryReactor* const reactor = call.DefaultReactor();
    reactor->Finish(ToGrpc(status));
    return reactor;
  }
  wire->Give(*unary);
  // gRPC keeps its buffer until the call ends; taking it lets the slices go before the kernel runs.
  // The object itself is not const: gRPC made it for this call.
  grpc::ByteBuffer message;
  message.Swap(&const_cast<grpc::ByteBuffer&>(request));
  unary->Begin({&message, {}});
  return wire.release();
}

}  // namespace attend
