// SPDX-License-Identifier: Apache-2.0
//
// AttentionService on gRPC's callback API. The data methods take and return raw buffers. Each call
// has one reactor, which deletes itself. gRPC's threads enter here and never block.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include "attend/v1/attention.grpc.pb.h"
#include "server/rpc/call_context.h"
#include "server/rpc/service_call.h"
#include "server/wire/wire_call.h"

namespace attend {

// Refuses a call of a method that is not served, whose path is `method`: counts and logs that, and
// returns what the call ends with, UNIMPLEMENTED unless its caller is refused. `method` must
// outlive the call.
Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& method,
                    const std::string& why);
// GetServerInfo.
void AnswerInfo(ServiceContext& context, ServiceCall::Wire wire);

// Calls of methods that do not exist: each is refused, counted and logged.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  explicit UnknownMethods(ServiceContext& context) : context_(context) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* call) override;

 private:
  ServiceContext& context_;
};

class AttentionServiceImpl final
    : public v1::AttentionService::WithRawCallbackMethod_Attend<
          v1::AttentionService::WithRawCallbackMethod_Backward<
              v1::AttentionService::WithRawCallbackMethod_AttendStream<
                  v1::AttentionService::WithRawCallbackMethod_AttendChunked<
                      v1::AttentionService::WithRawCallbackMethod_GetServerInfo<
                          v1::AttentionService::Service>>>>> {
 public:
  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  explicit AttentionServiceImpl(ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* call,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  Stream* AttendStream(grpc::CallbackServerContext* call) override;
  Stream* AttendChunked(grpc::CallbackServerContext* call) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;

 private:
  ServiceContext& context_;
};

}  // namespace attend
