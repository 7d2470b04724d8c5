// SPDX-License-Identifier: Apache-2.0
//
// One unary call for one attention.

#pragma once

#include <grpcpp/grpcpp.h>

#include <string_view>

#include "server/rpc/call_context.h"
#include "server/wire/message_format.h"

namespace attend {

// Takes the call, which is for that pass, to the engine. gRPC owns the returned reactor until its
// OnDone. `method` and `format` must outlive the call.
grpc::ServerUnaryReactor* BeginUnary(ServiceContext& context, std::string_view method,
                                     const MessageFormat& format, Pass pass,
                                     grpc::CallbackServerContext& call,
                                     const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

}  // namespace attend
