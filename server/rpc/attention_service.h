// SPDX-License-Identifier: Apache-2.0
//
// AttentionService, and calls of unknown methods.

#pragma once

#include <string>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/wire/wire_call.h"

namespace attend {

// Refuses a call of the unknown method at path `method`. Counts and logs it, and returns the status
// to end the call with: UNIMPLEMENTED, unless the caller is refused. `method` must outlive the
// call.
Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& method,
                    const std::string& why);

// Adds the service's methods. `context` must outlive the calls.
void AddAttention(ServiceContext& context, CallTable& table);

}  // namespace attend
