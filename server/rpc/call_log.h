// SPDX-License-Identifier: Apache-2.0
//
// What is written down of each call when it ends: in the log, if it failed, and in the access log;
// and the spans of calls that are no request to the engine (call_spans.h has the others').

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/util/status.h"
#include "server/log/access_log.h"
#include "server/log/logging.h"
#include "server/request/request.h"
#include "server/rpc/call_facts.h"

namespace attend {

// Of a request to the engine. `response_bytes` and `total_ns` as RecordEnd has them.
void LogEnd(ServiceContext& context, const Request& request, int64_t total_ns,
            int64_t response_bytes, const WireCall& call, const CallFacts& facts);

// Of a call whose caller is unknown, or may not make it. `access_log`: null if off. What it brought
// to say who it is, is written nowhere.
struct RefusedCall {
  std::string_view method;
  std::string_view caller;  // its name in --tokens; empty: unknown
  std::string peer;         // empty: nobody says
};
void LogRefused(Logger& logger, AccessLog* access_log, const Status& status,
                const RefusedCall& call);

// Of any other call, which is counted here too. `event` is the log line's, if it failed.
struct SmallCallEnd {
  const char* event;
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
};
void LogEnd(ServiceContext& context, const Status& status, const SmallCallEnd& end,
            const WireCall& call, const CallFacts& facts);

}  // namespace attend
