// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_facts.h"

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"

namespace attend {
namespace {

void Tell(const TraceParent& span, const WireCall& call) {
  if (span.valid()) call.AddInitialMetadata(kTraceParentKey, FormatTraceParent(span));
}

CallFacts Begin(const ServiceContext& context, std::string_view method, const Caller& caller,
                const WireCall& call) {
  TryAllocating([&] { call.AddInitialMetadata("attend-server-id", context.server_id); });
  CallFacts facts;
  facts.method = method;
  facts.began = context.clock.Now();
  facts.caller = caller;
  return facts;
}

}  // namespace

void TellLoad(const ServiceContext& context, const WireCall& call) {
  if (context.load != nullptr) TryAllocating([&] { context.load->Tell(call); });
}

// Two values are ambiguous and count as none.
TraceParent ParentOf(const WireCall& call) {
  std::string_view text;
  if (call.Find(kTraceParentKey, text) != 1) return {};
  return ParseTraceParent(text).value_or(TraceParent());
}

CallFacts ReadFacts(ServiceContext& context, std::string_view method, const Caller& caller,
                    const WireCall& call) {
  TellLoad(context, call);
  CallFacts facts = Begin(context, method, caller, call);
  if (context.access_log == nullptr && context.tracer == nullptr) return facts;
  facts.read = true;
  TryAllocating([&] { facts.parent = ParentOf(call); });  // on failure the trace ends here
  return facts;
}

void GiveSpan(ServiceContext& context, CallFacts& facts, const WireCall& call) {
  TryAllocating([&] {
    if (context.tracer != nullptr) facts.own = context.tracer->Begin(facts.parent);
    Tell(facts.own.valid() ? facts.own : facts.parent, call);
  });
}

CallFacts FactsOf(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call) {
  CallFacts facts = ReadFacts(context, method, caller, call);
  GiveSpan(context, facts, call);
  return facts;
}

CallFacts FactsOfStream(ServiceContext& context, std::string_view method, const Caller& caller,
                        const WireCall& call) {
  CallFacts facts = Begin(context, method, caller, call);
  facts.stream = facts.read = true;
  TryAllocating([&] {
    facts.parent = ParentOf(call);
    Tell(facts.parent, call);
  });
  return facts;
}

}  // namespace attend
