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
#include "server/rpc/wire_call.h"

namespace attend {

// Takes one of the tenant's open streams. A refusal is counted and logged, and its details are sent
// to the client, except for the status.
Status TakeStream(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call, CountHold& hold);

// Begins the stream made by `make` for the method's caller, with its place among the tenant's
// streams. Ends it at once if streams are not accepted any more. Returns the call's handler: the
// stream, or a handler of the refused call.
template <class Make>
CallHandler* BeginStream(ServiceContext& context, std::string_view method, const WireCall& wire,
                         const Make& make, Scope scope = Scope::kCompute) {
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
    stream = make(*caller, std::move(hold));
    return Status();
  });
  if (!status.ok()) return RefuseCall(wire, status);
  if (context.streams.Add(stream)) stream->EndWhenIdle();
  // Rights changed before the stream was registered, so RecheckAll may have missed it.
  if (generation() != known) stream->Recheck();
  stream->Begin();
  return stream;
}

}  // namespace attend
