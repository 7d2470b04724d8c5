// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/attention_service.h"

#include <google/protobuf/arena.h>

#include <new>
#include <optional>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/chunked_stream.h"
#include "server/rpc/open_stream.h"
#include "server/rpc/stream_call.h"
#include "server/rpc/unary_call.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// More than GetServerInfoRequest has, for fields of its future.
constexpr int64_t kInfoBytesMax = 4096;

}  // namespace

grpc::ServerUnaryReactor* AttentionServiceImpl::Attend(grpc::CallbackServerContext* call,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return BeginUnary(context_, AttendFormat(), Pass::kForward, *call, *request, *response);
}

grpc::ServerUnaryReactor* AttentionServiceImpl::Backward(grpc::CallbackServerContext* call,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return BeginUnary(context_, AttendFormat(), Pass::kBackward, *call, *request, *response);
}

AttentionServiceImpl::Stream* AttentionServiceImpl::AttendStream(
    grpc::CallbackServerContext* call) {
  return OpenStream(context_, *call, [&](const Caller& caller, CountHold hold) {
    return new StreamCall(context_, AttendFormat(), std::nullopt, caller, *call, std::move(hold));
  });
}

AttentionServiceImpl::Stream* AttentionServiceImpl::AttendChunked(
    grpc::CallbackServerContext* call) {
  return OpenStream(context_, *call, [&](const Caller& caller, CountHold hold) {
    return ChunkedStream::Make(context_, caller, *call, std::move(hold));
  });
}

grpc::ServerUnaryReactor* AttentionServiceImpl::GetServerInfo(grpc::CallbackServerContext* call,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const std::optional<Caller> caller = AdmitCaller(context_, *call, Scope::kAny, *reactor);
  if (!caller) return reactor;
  // Its request has no field, so there is nothing to parse.
  if (static_cast<int64_t>(request->Length()) > kInfoBytesMax) {
    reactor->Finish(
        ToGrpc(InvalidArgument("the message has " + std::to_string(request->Length()) +
                               " bytes, must have at most " + std::to_string(kInfoBytesMax))));
    return reactor;
  }
  if (MemoryIsShort()) {
    reactor->Finish(NoMemory());
    return reactor;
  }
  grpc::Status status;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    google::protobuf::Arena arena;  // Protobuf's messages lose what they hold where one fails
    auto* const info = google::protobuf::Arena::CreateMessage<v1::GetServerInfoResponse>(&arena);
    context_.fill_info(*caller, info);
    bool own = false;
    status = grpc::SerializationTraits<v1::GetServerInfoResponse>::Serialize(*info, response, &own);
  } catch (const std::bad_alloc&) {
    status = NoMemory();
  }
  reactor->Finish(status);
  return reactor;
}

grpc::ServerGenericBidiReactor* UnknownMethods::CreateReactor(
    grpc::GenericCallbackServerContext* call) {
  class Refusal final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refusal(const grpc::Status& status) { Finish(status); }
    void OnDone() override { delete this; }
  };
  Request request;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    // Strangers are not told which methods there are.
    const Result<Caller> caller = CallerOf(context_, *call, Scope::kAny);
    if (!caller.ok()) return new Refusal(ToGrpc(caller.status()));
    SetCaller(*caller, request);
    request.id = context_.next_id.fetch_add(1, std::memory_order_relaxed);
    request.received = context_.clock.Now();
    request.status = context_.reader.Reject(Rejection::kUnknownMethod,
                                            Unimplemented("there is no method " + call->method()));
    RecordEnd(context_, request, 0, 0, *call);
  } catch (const std::bad_alloc&) {
    if (request.status.ok()) request.status = ResourceExhausted("no memory");
  }
  return new Refusal(ToGrpc(request.status));
}

}  // namespace attend
