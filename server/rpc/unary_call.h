// SPDX-License-Identifier: Apache-2.0
//
// One Attend call.

#pragma once

#include <grpcpp/grpcpp.h>

#include "server/rpc/call_context.h"

namespace attend {

// Takes the call, which is for that pass, to the engine. gRPC owns the returned reactor until its
// OnDone.
grpc::ServerUnaryReactor* BeginUnary(ServiceContext& context, Pass pass,
                                     grpc::CallbackServerContext& call,
                                     const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

}  // namespace attend
