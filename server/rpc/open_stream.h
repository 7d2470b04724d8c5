// SPDX-License-Identifier: Apache-2.0
//
// Begins a call that stays open between requests.

#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "server/limits/tenant_limits.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/call_context.h"
#include "server/rpc/h2_wire.h"
#include "server/wire/wire_call.h"

namespace attend {

// Takes one of the streams that the caller's tenant may have open. A refusal is counted, logged and
// told to the call's client, but for its status.
Status TakeStream(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call, CountHold& hold);

// Begins the stream that `make` makes for the caller of that method, which holds its place among
// its tenant's, and ends it if streams are no longer accepted. Returns what handles the call: the
// stream, unless it is refused.
template <class Make>
CallHandler* BeginStream(ServiceContext& context, std::string_view method, const H2Wire& wire,
                         const Make& make, Scope scope = Scope::kCompute) {
  OpenStreams::Place place;
  const auto generation = [&context] {
    return context.authenticator == nullptr ? 0 : context.authenticator->generation();
  };
  const uint64_t known = generation();
  std::invoke_result_t<Make, const Caller&, CountHold> stream = nullptr;
  const Status status = OrOutOfMemory([&]() -> Status {
    const Result<Caller> caller = CallerOf(context, wire, method, scope, /*came=*/0);
    if (!caller.ok()) return caller.status();
    CountHold hold;
    ATTEND_RETURN_IF_ERROR(TakeStream(context, method, *caller, wire, hold));
    place = OpenStreams::MakePlace();
    stream = make(*caller, std::move(hold));
    return Status();
  });
  if (!status.ok()) return RefuseCall(wire, status);
  if (context.streams.Add(std::move(place), stream)) stream->EndWhenIdle();
  // What callers may do changed before the stream was among those that are asked then.
  if (generation() != known) stream->Recheck();
  stream->Begin();
  return stream;
}

}  // namespace attend
