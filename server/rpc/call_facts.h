// SPDX-License-Identifier: Apache-2.0
//
// What is known of a call before its first message, and is written down when it ends.

#pragma once

#include <grpcpp/grpcpp.h>

#include <string_view>

#include "kernels/util/clock.h"
#include "server/auth/caller.h"
#include "server/trace/trace_parent.h"

namespace attend {

struct ServiceContext;

struct CallFacts {
  // As in its :path, "/attend.v1.AttentionService/Attend". Lives as long as the call.
  std::string_view method;
  TimePoint began{};
  Caller caller = {};
  bool stream = false;      // each of its requests has a span of its own
  TraceParent parent = {};  // the client's span; invalid: it said none
  TraceParent own = {};     // the call's; invalid: it has none
};

// Reads the call's metadata, and tells its client of the span that it has.
CallFacts FactsOf(ServiceContext& context, std::string_view method, const Caller& caller,
                  grpc::CallbackServerContext& call);
// The same of a stream. Its client is told of its own span.
CallFacts FactsOfStream(ServiceContext& context, std::string_view method, const Caller& caller,
                        grpc::CallbackServerContext& call);

}  // namespace attend
