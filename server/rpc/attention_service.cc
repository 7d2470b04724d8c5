// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/attention_service.h"

#include <optional>

#include "attend/v1/attention.pb.h"
#include "server/rpc/chunked_stream.h"
#include "server/rpc/service_call.h"
#include "server/rpc/stream_call.h"
#include "server/rpc/unary_call.h"

namespace attend {
namespace {

// Never refused by a limit, because it reports the limits. Accepts more bytes than
// GetServerInfoRequest has, for its future fields.
constexpr ServiceMethod kInfo{.event = "info call failed",
                              .scope = Scope::kAny,
                              .charge = ServiceMethod::Charge::kBytes,
                              .request_bytes_max = 4096};

}  // namespace

void AddAttention(CallTable& table) {
  UnaryCall::Add(table, "/attend.v1.AttentionService/Attend", AttendFormat(), Pass::kForward);
  UnaryCall::Add(table, "/attend.v1.AttentionService/Backward", AttendFormat(), Pass::kBackward);
  StreamCall::Add(table, "/attend.v1.AttentionService/AttendStream", AttendFormat(), std::nullopt);
  ChunkedStream::Add(table);
  AddSmall<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      table, kInfo,
      [&context = table.context()](const Caller& caller, const auto&, auto& out, auto&) {
        return context.fill_info(caller, &out), Status();
      });
}

}  // namespace attend
