// SPDX-License-Identifier: Apache-2.0
//
// The served methods, by path. Each service adds its own; h2_calls.h dispatches to them.

#pragma once

#include <functional>
#include <map>
#include <string>

#include "kernels/util/status.h"
#include "server/rpc/service_call.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

struct CallTable {
  // Unary calls with tensors.
  struct Data {
    const MessageFormat* format = nullptr;
    Pass pass = Pass::kForward;
  };
  // Answers a call with one small message each way.
  using Small = std::function<void(ServiceCall::Wire)>;
  // Begins a stream and returns its handler.
  using Stream = std::function<CallHandler*(ServerCall&)>;

  std::map<std::string, Data> data;
  std::map<std::string, Small> small;
  std::map<std::string, Stream> streams;
};

// Adds the method whose request type is In. `answer` and `may` are as in ServiceCall::Run.
// `context` and `method` must outlive every call.
template <class In, class Out, class Answer, class May = ServiceCall::Anyone>
void AddSmall(ServiceContext& context, const ServiceMethod& method, Answer answer, CallTable& table,
              May may = May()) {
  table.small[MethodOf<In>()] = [&context, &method, answer, may](ServiceCall::Wire wire) {
    ServiceCall::Run<In, Out>(context, method, std::move(wire), answer, may);
  };
}

}  // namespace attend
