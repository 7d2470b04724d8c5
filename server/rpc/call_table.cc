// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_table.h"

#include <string>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/wire_call.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

// Counts and logs a call of an unknown method, and returns the status to end it with.
Status RefuseMethod(ServiceContext& context, const WireCall& call, const std::string& path) {
  return OrOutOfMemory([&]() -> Status {
    // Unauthenticated clients do not learn which methods exist.
    const Result<Caller> caller = CallerOf(context, call, path, Scope::kAny, /*came=*/0);
    if (!caller.ok()) return caller.status();
    CallFacts facts = FactsOf(context, path, *caller, call);
    facts.known_method = false;
    return RecordRefused(
        context, Because(Rejection::kUnknownMethod, Unimplemented("unknown method " + path)), call,
        facts);
  });
}

}  // namespace

MessageBound CallTable::MessageBoundOf(std::string_view path) const {
  const auto found = methods_.find(path);
  return found == methods_.end() ? kOpen : found->second.bound;
}

CallHandler* CallTable::Begin(ServerCall& call) {
  const std::string& path = call.path();
  if (const auto found = methods_.find(path); found != methods_.end()) {
    return found->second.starter(call);
  }
  const WireCall wire(call);
  return RefuseCall(wire, RefuseMethod(context_, wire, path));
}

}  // namespace attend
