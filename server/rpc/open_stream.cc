// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/open_stream.h"

namespace attend {

Status TakeStream(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call, CountHold& hold) {
  Status status = context.limits.Take(caller.tenant, Limit::kStreams, hold);
  if (status.ok()) return status;
  status = RecordRefused(context, std::move(status), call, FactsOf(context, method, caller, call));
  AddRefusal(context, status.code(), Refusal(), call);
  return status;
}

}  // namespace attend
