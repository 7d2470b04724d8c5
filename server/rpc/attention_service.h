// SPDX-License-Identifier: Apache-2.0
//
// AttentionService, and calls of methods that do not exist.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/wire/wire_call.h"

namespace attend {

// Refuses a call of a method that is not served, whose path is `method`: counts and logs that, and
// returns what the call ends with, UNIMPLEMENTED unless its caller is refused. `method` must
// outlive the call.
Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& method,
                    const std::string& why);

// Calls of methods that do not exist: each is refused, counted and logged.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  explicit UnknownMethods(ServiceContext& context) : context_(context) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* call) override;

 private:
  ServiceContext& context_;
};

// Adds all methods of the service. `context` must outlive the calls.
void AddAttention(ServiceContext& context, CallTable& table);

}  // namespace attend
