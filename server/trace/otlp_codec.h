// SPDX-License-Identifier: Apache-2.0
//
// OTLP's messages for traces (opentelemetry.proto.collector.trace.v1), by their public field
// numbers: Debian has no OpenTelemetry for C++, and these are few. Pure.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/util/status.h"
#include "server/trace/call_span.h"

namespace attend {

inline constexpr char kExportMethod[] =
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

// What all spans of the process have.
struct SpanResource {
  std::string service = "attend-server";
  std::string version;
  std::string instance;  // unique to the process
};

// An ExportTraceServiceRequest.
std::string EncodeSpans(const SpanResource& resource, std::span<const CallSpan> calls);

// How many spans an ExportTraceServiceResponse refuses, and why.
struct PartialSuccess {
  int64_t rejected = 0;
  std::string error;
};
// INVALID_ARGUMENT if it is no such message.
Result<PartialSuccess> DecodeExportResponse(std::string_view message);

}  // namespace attend
