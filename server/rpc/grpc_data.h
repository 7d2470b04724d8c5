// SPDX-License-Identifier: Apache-2.0
//
// Calls that bring tensors, carried by gRPC's library, which owns what these return until its
// OnDone.

#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string_view>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"
#include "server/rpc/data_wire.h"
#include "server/rpc/grpc_wire.h"
#include "server/wire/grpc_status.h"
#include "server/wire/message_format.h"

namespace attend {

using RawStream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// A stream that is refused.
class EndedStream final : public RawStream {
 public:
  explicit EndedStream(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

// The wire of a stream, which deletes itself. Without a handler it is one that is refused.
class GrpcStream final : public RawStream, public StreamWire {
 public:
  explicit GrpcStream(grpc::CallbackServerContext& call) : call_(call) {}

  const WireCall& call() const override { return call_; }
  void Give(StreamHandler& handler) override { handler_ = &handler; }
  void Read(grpc::ByteBuffer* to) override { StartRead(to); }
  void Write(const grpc::ByteBuffer* message, bool hurries) override {
    grpc::WriteOptions options;
    if (!hurries) options.set_buffer_hint();
    StartWrite(message, options);
  }
  void End(const grpc::Status& status) override { Finish(status); }

  void OnReadDone(bool ok) override { handler_->OnReadDone(ok); }
  void OnWriteDone(bool ok) override { handler_->OnWriteDone(ok); }
  void OnCancel() override {
    if (handler_ != nullptr) handler_->OnCancel();
  }
  void OnDone() override {
    if (handler_ != nullptr) handler_->OnDone();
    delete this;
  }

 private:
  const GrpcWire call_;
  StreamHandler* handler_ = nullptr;  // null: it was refused
};

// Takes a unary call, which is for that pass, to the engine. `method` and `format` must outlive the
// call.
grpc::ServerUnaryReactor* BeginGrpcUnary(ServiceContext& context, std::string_view method,
                                         const MessageFormat& format, Pass pass,
                                         grpc::CallbackServerContext& call,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

// A stream that `begin(wire)` begins; an error: there is none, and the call ends so.
template <class Begin>
RawStream* OpenGrpcStream(grpc::CallbackServerContext& call, const Begin& begin) {
  std::unique_ptr<GrpcStream> wire;
  if (!TryAllocating([&] { wire = std::make_unique<GrpcStream>(call); })) {
    return new EndedStream(ToGrpc(OutOfMemory()));
  }
  const Status status = begin(*wire);
  if (!status.ok()) wire->End(ToGrpc(status));
  return wire.release();
}

}  // namespace attend
