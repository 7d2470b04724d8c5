// SPDX-License-Identifier: Apache-2.0
//
// Records the end of a call: log lines for failures, access log lines, and the spans of calls that
// are not engine requests (call_spans.h makes the others).

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

// For an engine request. `response_bytes` and `total_ns` are as in RecordEnd.
void LogEnd(ServiceContext& context, const Request& request, int64_t total_ns,
            int64_t response_bytes, const WireCall& call, const CallFacts& facts);

// A call whose caller is unknown or lacks the right. `access_log`: null if off. Its credentials are
// never logged.
struct RefusedCall {
  std::string_view method;
  std::string_view caller;  // its name in --tokens; empty: unknown
  std::string peer;         // empty: unknown
};
void LogRefused(Logger& logger, AccessLog* access_log, const Status& status,
                const RefusedCall& call);

// For any other call; also counts it. `event` is the log line's if the call failed.
struct SmallCallEnd {
  const char* event;
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
};
void LogEnd(ServiceContext& context, const Status& status, const SmallCallEnd& end,
            const WireCall& call, const CallFacts& facts);

}  // namespace attend
