// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_spans.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"

namespace attend {
namespace {

// Converts the server's clock to wall-clock time, which collectors expect.
class WallTimes {
 public:
  explicit WallTimes(const Clock& clock) : steady_(clock.Now()) {}
  SpanTime operator()(TimePoint time) const {
    return wall_ + std::chrono::duration_cast<SpanTime::duration>(time - steady_);
  }

 private:
  const TimePoint steady_;
  const SpanTime wall_ = std::chrono::system_clock::now();
};

CallSpan BeginSpan(ServiceContext& context, const Status& status, const CallFacts& facts) {
  CallSpan span;
  span.own = facts.own;
  span.parent = facts.parent.span;
  // Names made up by clients would be unbounded.
  span.method = facts.known_method ? facts.method : "unknown method";
  span.code = status.code();
  span.error = status.message();
  span.tenant = context.engine.options().tenants.list()[facts.caller.tenant].name;
  return span;
}

// Phases are shown one after the other, as in the batch; what overlapped ends where the batch did.
void AddPhases(const Request& request, const WallTimes& wall, Tracer& tracer, CallSpan& span) {
  const auto add = [&](std::string_view name, TimePoint from, TimePoint to) {
    span.AddPhase(name, tracer.NextSpan(), wall(from), wall(std::max(from, to)));
  };
  if (request.enqueued == TimePoint()) return;
  const bool chunked = request.transport == Transport::kChunked;
  add(chunked ? "upload" : "receive", request.received, request.enqueued);
  if (request.started == TimePoint()) return;
  add("queue", request.enqueued, request.started);
  if (request.completed == TimePoint()) return;
  TimePoint at = request.started;
  const auto add_part = [&](std::string_view name, int64_t ns) {
    const TimePoint end = std::min(at + std::chrono::nanoseconds(ns), request.completed);
    add(name, at, end);
    at = std::max(at, end);
  };
  add_part("copy_in", request.copy_in_ns);
  add_part("kernel", request.kernel_ns);
  add_part("copy_out", request.copy_out_ns);
  at = request.completed;
  if (request.report.has_value()) {
    const TimePoint checked = at + std::chrono::nanoseconds(request.check_ns);
    add("check", at, checked);
    at = checked;
  }
  add("reply", at, at);  // ends with the span
}

CallSpan RequestSpan(ServiceContext& context, const Request& request, int64_t response_bytes,
                     const CallFacts& facts) {
  const WallTimes wall(context.clock);
  CallSpan span = BeginSpan(context, request.status, facts);
  span.begin = wall(request.received);
  span.request_id = request.request_id;
  span.transport = TransportName(request.transport);
  if (request.attention.problem.dim > 0) span.dtype = DTypeName(request.attention.problem.dtype);
  if (request.started != TimePoint()) {
    span.kernel = KernelName(request.selection.kernel);
    span.device = request.device_name;
    span.batch_requests = request.batch_requests;
  }
  const TensorBytes bytes = BytesOf(request, response_bytes);
  span.bytes_in = bytes.in;
  span.bytes_out = bytes.out;
  AddPhases(request, wall, *context.tracer, span);
  return span;
}

}  // namespace

TensorBytes BytesOf(const Request& request, int64_t response_bytes) {
  TensorBytes bytes{request.message_bytes + request.file_bytes.input, response_bytes};
  const bool answered = request.status.ok();
  if (answered) bytes.out += request.file_bytes.output;
  if (const SharedTensors* const shared = request.source.shared()) {
    for (const Transport way : {Transport::kSharedMemory, Transport::kCudaIpc}) {
      bytes.in += shared->BytesIn(way);
      if (answered) bytes.out += shared->BytesOut(way);
    }
  }
  return bytes;
}

std::unique_ptr<OpenSpan> SpanOf(ServiceContext& context, const Request& request,
                                 int64_t response_bytes, const CallFacts& facts) {
  std::unique_ptr<OpenSpan> open;
  if (!facts.own.valid()) return open;
  TryAllocating([&] {
    open = std::make_unique<OpenSpan>(*context.tracer,
                                      RequestSpan(context, request, response_bytes, facts));
  });
  return open;
}

void EndSpan(ServiceContext& context, const Status& status, const CallFacts& facts) {
  if (!facts.own.valid()) return;
  TryAllocating([&] {
    CallSpan span = BeginSpan(context, status, facts);
    span.begin = WallTimes(context.clock)(facts.began);
    const OpenSpan ended(*context.tracer, std::move(span));
  });
}

}  // namespace attend
