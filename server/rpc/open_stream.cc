// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/open_stream.h"

namespace attend {

Status TakeStream(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call, CountHold& hold) {
  Status status = context.limits.Take(caller.tenant, Limit::kStreams, hold);
  if (status.ok()) return status;
  Request request;
  request.id = context.next_id.fetch_add(1, std::memory_order_relaxed);
  request.received = context.clock.Now();
  SetCaller(caller, request);
  request.status = std::move(status);
  RecordEnd(context, request, 0, 0, call, FactsOf(context, method, caller, call));
  AddRefusal(context, request.status.code(), request.refusal, call);
  return request.status;
}

}  // namespace attend
