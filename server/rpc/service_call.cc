// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/service_call.h"

#include <optional>

#include "server/rpc/call_caller.h"
#include "server/rpc/call_log.h"

namespace attend {

ServiceCall::Ref ServiceCall::Begin(ServiceContext& context, const ServiceMethod& method,
                                    const std::string& name, Wire wire) {
  const std::optional<Caller> caller =
      AdmitCaller(context, *wire.call, name, method.scope, *wire.request, wire.finish);
  if (!caller) return nullptr;
  const CallFacts facts = FactsOf(context, name, *caller, *wire.call);
  const auto came = std::ssize(*wire.request);
  Ref begun;
  const Status status = OrOutOfMemory([&] {
    begun = std::make_shared<ServiceCall>(context, method, facts, wire);
    return method.charge == ServiceMethod::Charge::kPlace
               ? context.limits.BeginSmall(caller->tenant, begun->place_, came)
               : Status();
  });
  if (method.charge == ServiceMethod::Charge::kBytes) context.limits.Came(caller->tenant, came);
  if (status.ok()) return begun;
  ServiceCall(context, method, facts, std::move(wire)).End(status);
  return nullptr;
}

void ServiceCall::Note(const Status& status) {
  const SmallCallEnd end{method_.event, std::ssize(*wire_.request), std::ssize(*wire_.response)};
  if (method_.charge != ServiceMethod::Charge::kNone) {
    context_.limits.Came(facts_.caller.tenant, end.response_bytes);
  }
  place_.End(end.request_bytes, true, true);
  LogEnd(context_, status, end, *wire_.call, facts_);
  if (method_.audit == nullptr) return;
  const std::string peer = wire_.call->Peer();
  const std::string caller = facts_.caller.name == nullptr ? "" : *facts_.caller.name;
  context_.logger.LogAlways(method_.audit, {{"method", facts_.method},
                                            {"code", CodeName(status.code())},
                                            {"caller", caller},
                                            {"peer", peer},
                                            {"asked", asked_}});
}

void ServiceCall::End(const Status& status, const Refusal& refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Note(status);
  if (!status.ok()) AddRefusal(context_, status.code(), refusal, *wire_.call);
  wire_.finish(status);
}

}  // namespace attend
