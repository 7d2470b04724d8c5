// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/attention_service.h"

#include <optional>
#include <string>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/chunked_stream.h"
#include "server/rpc/stream_call.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

// Never refused by a limit, because it reports the limits. Accepts more bytes than
// GetServerInfoRequest has, for its future fields.
constexpr ServiceMethod kInfo{.event = "info call failed",
                              .scope = Scope::kAny,
                              .charge = ServiceMethod::Charge::kBytes,
                              .request_bytes_max = 4096};

}  // namespace

void AddAttention(ServiceContext& context, CallTable& table) {
  const std::string service = "/attend.v1.AttentionService";
  table.data[service + "/Attend"] = {&AttendFormat(), Pass::kForward};
  table.data[service + "/Backward"] = {&AttendFormat(), Pass::kBackward};
  table.streams[service + "/AttendStream"] = [&context](ServerCall& call) {
    constexpr std::string_view kMethod = "/attend.v1.AttentionService/AttendStream";
    return StreamCall::Open(context, kMethod, AttendFormat(), std::nullopt, call);
  };
  table.streams[service + "/AttendChunked"] = [&context](ServerCall& call) {
    return ChunkedStream::Open(context, call);
  };
  AddSmall<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      context, kInfo,
      [&context](const Caller& caller, const auto&, auto& out, auto&) {
        return context.fill_info(caller, &out), Status();
      },
      table);
}

Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& method,
                    const std::string& why) {
  return OrOutOfMemory([&]() -> Status {
    // Unauthenticated clients do not learn which methods exist.
    const Result<Caller> caller = CallerOf(context, call, method, Scope::kAny, /*came=*/0);
    if (!caller.ok()) return caller.status();
    Request request;
    SetCaller(*caller, request);
    request.id = context.next_id.fetch_add(1, std::memory_order_relaxed);
    request.received = context.clock.Now();
    request.status = Because(Rejection::kUnknownMethod, Unimplemented(why));
    CallFacts facts = FactsOf(context, method, *caller, call);
    facts.known_method = false;
    RecordEnd(context, request, 0, 0, call, facts);
    return request.status;
  });
}

}  // namespace attend
