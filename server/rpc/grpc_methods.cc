// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/grpc_methods.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <new>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/grpc_data.h"
#include "server/rpc/grpc_wire.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

using Bytes = grpc::ByteBuffer;
using Context = grpc::CallbackServerContext;
using grpc::internal::CallbackBidiHandler;
using grpc::internal::CallbackUnaryHandler;
using grpc::internal::RpcMethod;

grpc::ServerUnaryReactor* Answer(const CallTable::Small& small, Context& call, const Bytes& request,
                                 Bytes& response) {
  grpc::ServerUnaryReactor* const reactor = call.DefaultReactor();
  ServiceCall::Wire wire{nullptr, &request, &response,
                         [reactor](const grpc::Status& status) { reactor->Finish(status); }};
  try {
    // From where gRPC's own memory of the call is: health is told though other calls are refused.
    const OnNoMemory wait(OnNoMemory::kWait);
    wire.call = std::make_shared<GrpcWire>(call);
  } catch (const std::bad_alloc&) {
    reactor->Finish(ToGrpc(OutOfMemory()));
    return reactor;
  }
  small(std::move(wire));
  return reactor;
}

}  // namespace

GrpcMethods::GrpcMethods(ServiceContext& context, const CallTable& table) {
  const auto add_unary = [this](const std::string& path, auto answer) {
    Add(path.c_str(), RpcMethod::NORMAL_RPC, new CallbackUnaryHandler<Bytes, Bytes>(answer));
  };
  const auto add_stream = [this](const char* path, auto open) {
    Add(path, RpcMethod::BIDI_STREAMING, new CallbackBidiHandler<Bytes, Bytes>(open));
  };
  for (const auto& [path, data] : table.data) {
    add_unary(path, [&context, &path = path, &data = data](Context* call, const Bytes* request,
                                                           Bytes* response) {
      return BeginGrpcUnary(context, path, *data.format, data.pass, *call, *request, *response);
    });
  }
  for (const auto& [path, small] : table.small) {
    add_unary(path, [&small = small](Context* call, const Bytes* request, Bytes* response) {
      return Answer(small, *call, *request, *response);
    });
  }
  for (const auto& [path, begin] : table.streams) {
    add_stream(path.c_str(),
               [&begin = begin](Context* call) { return OpenGrpcStream(*call, begin); });
  }
}

void GrpcMethods::Add(const char* path, RpcMethod::RpcType type,
                      grpc::internal::MethodHandler* handler) {
  AddMethod(new grpc::internal::RpcServiceMethod(path, type, nullptr));
  MarkMethodRawCallback(count_++, handler);
}

}  // namespace attend
