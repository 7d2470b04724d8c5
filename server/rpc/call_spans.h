// SPDX-License-Identifier: Apache-2.0
//
// Builds the spans of calls that have ended.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/rpc/call_facts.h"
#include "server/trace/tracer.h"

namespace attend {

// Tensor bytes of a request and of its answer, over all transports.
struct TensorBytes {
  int64_t in = 0;
  int64_t out = 0;
};
TensorBytes BytesOf(const Request& request, int64_t response_bytes);

// The span of a request that is about to be answered; it ends with the object. Null: not traced, or
// no memory.
std::unique_ptr<OpenSpan> SpanOf(ServiceContext& context, const Request& request,
                                 int64_t response_bytes, const CallFacts& facts);
// The same for a call that is not an engine request.
void EndSpan(ServiceContext& context, const Status& status, const CallFacts& facts);

}  // namespace attend
