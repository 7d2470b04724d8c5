// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_facts.h"

#include <iterator>
#include <new>
#include <string>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"

namespace attend {
namespace {

// Two that disagree are none.
TraceParent ParentOf(const grpc::CallbackServerContext& call) {
  const auto& metadata = call.client_metadata();
  const auto [first, last] = metadata.equal_range(kTraceParentKey);
  if (first == last || std::next(first) != last) return {};
  return ParseTraceParent({first->second.data(), first->second.size()}).value_or(TraceParent());
}

void Tell(const TraceParent& span, grpc::CallbackServerContext& call) {
  if (span.valid()) call.AddInitialMetadata(kTraceParentKey, FormatTraceParent(span));
}

}  // namespace

CallFacts FactsOf(ServiceContext& context, std::string_view method, const Caller& caller,
                  grpc::CallbackServerContext& call) {
  CallFacts facts{method, context.clock.Now(), caller};
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    facts.parent = ParentOf(call);
    if (context.tracer != nullptr) facts.own = context.tracer->Begin(facts.parent);
    Tell(facts.own.valid() ? facts.own : facts.parent, call);
  } catch (const std::bad_alloc&) {  // it is traced no further
  }
  return facts;
}

CallFacts FactsOfStream(ServiceContext& context, std::string_view method, const Caller& caller,
                        grpc::CallbackServerContext& call) {
  CallFacts facts{method, context.clock.Now(), caller, true};
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    facts.parent = ParentOf(call);
    Tell(facts.parent, call);
  } catch (const std::bad_alloc&) {
  }
  return facts;
}

}  // namespace attend
