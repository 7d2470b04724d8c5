// SPDX-License-Identifier: Apache-2.0
//
// Decides which calls are traced, and exports their spans. Thread-safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/trace/call_span.h"
#include "server/trace/span_exporter.h"
#include "server/trace/trace_parent.h"
#include "server/util/mix.h"

namespace attend {

class Tracer {
 public:
  struct Seeds {  // random
    uint64_t span = 0;
    uint64_t trace = 0;
  };
  // `share` applies to calls whose clients do not trace.
  Tracer(double share, Seeds seeds, std::unique_ptr<SpanExporter> exporter)
      : share_(share), ids_(seeds.span, seeds.trace), exporter_(std::move(exporter)) {}

  // The span of a call. If the client's span `parent` is valid, its flag decides whether there is
  // one. Invalid: not traced.
  TraceParent Begin(const TraceParent& parent) {
    if (!parent.valid()) {
      const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
      return InSample(0, number, share_) ? ids_.NextTrace() : TraceParent();
    }
    if (!parent.sampled) return {};
    return {parent.trace_high, parent.trace_low, ids_.NextSpan(), true};
  }
  uint64_t NextSpan() { return ids_.NextSpan(); }

  SpanExporter& exporter() { return *exporter_; }

 private:
  const double share_;
  SpanIds ids_;
  std::atomic<uint64_t> next_{0};
  const std::unique_ptr<SpanExporter> exporter_;
};

// A span that ends, together with its last phase, when this is destroyed.
class OpenSpan {
 public:
  OpenSpan(Tracer& tracer, CallSpan&& span) : tracer_(tracer), span_(std::move(span)) {}
  ~OpenSpan() {
    span_.end = std::chrono::system_clock::now();
    if (span_.phase_count > 0) span_.phases[span_.phase_count - 1].end = span_.end;
    tracer_.exporter().Offer(std::move(span_));
  }
  OpenSpan(const OpenSpan&) = delete;
  OpenSpan& operator=(const OpenSpan&) = delete;

 private:
  Tracer& tracer_;
  CallSpan span_;
};

}  // namespace attend
