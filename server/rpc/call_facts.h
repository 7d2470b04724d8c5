// SPDX-License-Identifier: Apache-2.0
//
// What is known of a call before its first message, and is written down when it ends.

#pragma once

#include <string_view>

#include "kernels/util/clock.h"
#include "server/auth/caller.h"
#include "server/trace/trace_parent.h"
#include "server/wire/wire_call.h"

namespace attend {

struct ServiceContext;

struct CallFacts {
  // As in its :path, "/attend.v1.AttentionService/Attend". Lives as long as the call.
  std::string_view method;
  bool known_method = true;  // false: a name that its client made up
  TimePoint began{};
  Caller caller = {};
  bool stream = false;      // each of its requests has a span of its own
  bool read = false;        // the metadata was looked at for the next
  TraceParent parent = {};  // the client's span; invalid: it said none
  TraceParent own = {};     // the call's; invalid: it has none
};

// What the call's metadata says, if it does so once and is valid. Makes a map of the metadata: one
// thread at a time.
TraceParent ParentOf(const WireCall& call);

// How busy the server is, if it says so, to a call's client. For streams, when they end.
void TellLoad(const ServiceContext& context, const WireCall& call);

// Tells the call's client which server this is, and how busy. Reads the call's metadata if there is
// an access log or a tracer; else only a failure is written down, and that reads it then.
CallFacts ReadFacts(ServiceContext& context, std::string_view method, const Caller& caller,
                    const WireCall& call);
// Gives the call a span, if it is to have one, and tells its client, before anything is written.
void GiveSpan(ServiceContext& context, CallFacts& facts, const WireCall& call);
// Both.
CallFacts FactsOf(ServiceContext& context, std::string_view method, const Caller& caller,
                  const WireCall& call);
// Of a stream, whose metadata is read in any case. Its client is told of its own span, and of the
// load when the stream ends.
CallFacts FactsOfStream(ServiceContext& context, std::string_view method, const Caller& caller,
                        const WireCall& call);

}  // namespace attend
