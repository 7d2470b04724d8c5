// SPDX-License-Identifier: Apache-2.0
//
// A call's position in a trace: the traceparent header of W3C Trace Context, level 1. Pure, except
// for SpanIds.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/util/mix.h"

namespace attend {

// The metadata key, in lower case.
inline constexpr char kTraceParentKey[] = "traceparent";

// A span's position in its trace. Ids are numbers, in the order of their digits.
struct TraceParent {
  uint64_t trace_high = 0;
  uint64_t trace_low = 0;
  uint64_t span = 0;  // 0: none
  bool sampled = false;

  bool valid() const { return span != 0; }
  friend bool operator==(const TraceParent&, const TraceParent&) = default;
};

// Empty if the text is not a traceparent, or an id is zero. Of later versions, the fields of the
// first one are read.
std::optional<TraceParent> ParseTraceParent(std::string_view text);
// In version 00.
std::string FormatTraceParent(const TraceParent& parent);
// The ids in hexadecimal.
std::string TraceIdText(const TraceParent& parent);
std::string SpanIdText(uint64_t span);

// Generates unique ids: those of one process do not repeat, and processes have different seeds.
// Thread-safe.
class SpanIds {
 public:
  SpanIds(uint64_t seed, uint64_t trace_seed) : seed_(seed), trace_seed_(trace_seed) {}

  uint64_t NextSpan() {
    for (;;) {
      const uint64_t id = Mix(seed_ ^ next_.fetch_add(1, std::memory_order_relaxed));
      if (id != 0) return id;
    }
  }
  // A root span of a new trace.
  TraceParent NextTrace() {
    const uint64_t span = NextSpan();
    return {Mix(~(trace_seed_ ^ span)), Mix(trace_seed_ ^ span), span, true};
  }

 private:
  const uint64_t seed_;
  const uint64_t trace_seed_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace attend
