// SPDX-License-Identifier: Apache-2.0
//
// AttentionService, and calls of methods that do not exist.

#pragma once

#include <string>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/wire/wire_call.h"

namespace attend {

// Refuses a call of a method that is not served, whose path is `method`: counts and logs that, and
// returns what the call ends with, UNIMPLEMENTED unless its caller is refused. `method` must
// outlive the call.
Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& method,
                    const std::string& why);

// Adds all methods of the service. `context` must outlive the calls.
void AddAttention(ServiceContext& context, CallTable& table);

}  // namespace attend
