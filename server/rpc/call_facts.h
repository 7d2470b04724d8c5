// SPDX-License-Identifier: Apache-2.0
//
// Facts about a call that are known before its first message and recorded when it ends.

#pragma once

#include <string_view>

#include "kernels/util/clock.h"
#include "server/auth/caller.h"
#include "server/rpc/wire_call.h"
#include "server/trace/trace_parent.h"

namespace attend {

struct ServiceContext;

struct CallFacts {
  // The :path, such as "/attend.v1.AttentionService/Attend". Lives as long as the call.
  std::string_view method;
  bool known_method = true;  // false: the client made the name up
  TimePoint began{};
  Caller caller = {};
  bool stream = false;      // each of its requests has its own span
  bool read = false;        // the metadata was searched for `parent`
  TraceParent parent = {};  // the client's span; invalid: none
  TraceParent own = {};     // the call's span; invalid: none
};

// The client's span from the metadata, if it is valid and given once.
TraceParent ParentOf(const WireCall& call);

// Reports the load to the client, if the server is configured to. For streams, when they end.
void TellLoad(const ServiceContext& context, const WireCall& call);

// Tells the client the server's id and load. Reads the metadata only if there is an access log or a
// tracer; otherwise only failures are recorded, and they read it later.
CallFacts ReadFacts(ServiceContext& context, std::string_view method, const Caller& caller,
                    const WireCall& call);
// Gives the call a span, if tracing selects it, and tells the client, before anything is written.
void GiveSpan(ServiceContext& context, CallFacts& facts, const WireCall& call);
// ReadFacts, then GiveSpan.
CallFacts FactsOf(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call);
// For a stream, whose metadata is always read. Its requests get spans of their own, and the load is
// reported when the stream ends.
CallFacts FactsOfStream(ServiceContext& context, std::string_view method, const Caller& caller,
                        const WireCall& call);

}  // namespace attend
