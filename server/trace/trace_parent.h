// SPDX-License-Identifier: Apache-2.0
//
// Whose part a call is of: W3C Trace Context's traceparent, level 1. Pure, but for the ids that
// SpanIds makes.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/util/mix.h"

namespace attend {

// The key of the metadata, which is lower case there.
inline constexpr char kTraceParentKey[] = "traceparent";

// A span's place in its trace. Ids are read as numbers, in the order of their digits.
struct TraceParent {
  uint64_t trace_high = 0;
  uint64_t trace_low = 0;
  uint64_t span = 0;  // 0: there is none
  bool sampled = false;

  bool valid() const { return span != 0; }
  friend bool operator==(const TraceParent&, const TraceParent&) = default;
};

// Nothing if the text is not a traceparent, or one whose ids are all zero. Of later versions, what
// the first one has is read.
std::optional<TraceParent> ParseTraceParent(std::string_view text);
// As version 00.
std::string FormatTraceParent(const TraceParent& parent);
// The ids as hexadecimal digits.
std::string TraceIdText(const TraceParent& parent);
std::string SpanIdText(uint64_t span);

// Ids that no other has: a process's do not repeat, and two processes' differ by their seeds.
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
  // A span that begins a trace.
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
