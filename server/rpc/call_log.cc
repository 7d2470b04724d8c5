// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_log.h"

#include <array>
#include <cassert>
#include <span>
#include <string>

#include "server/log/access_log.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_spans.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

// These bound a line of the access log to PIPE_BUF bytes, however its text is escaped, so that a
// write to a pipe is atomic.
constexpr size_t kMethodBytesMax = 96;
constexpr size_t kErrorBytesMax = 160;

// The fields of one line. The values they refer to must outlive them.
class Fields {
 public:
  void Add(std::string_view name, decltype(LogField::value) value) {
    assert(count_ < fields_.size());
    fields_[count_++] = {name, value};
  }
  std::span<const LogField> get() const { return {fields_.data(), count_}; }

 private:
  std::array<LogField, 40> fields_;
  size_t count_ = 0;
};

int64_t Microseconds(TimePoint from, TimePoint to) { return NanosecondsBetween(from, to) / 1000; }

void AddProblem(const Request& request, Fields& fields) {
  const Problem& problem = request.attention.problem;
  if (problem.dim == 0) return;  // refused before it was parsed
  fields.Add("pass", request.backward ? "backward" : "forward");
  fields.Add("dtype", DTypeName(problem.dtype));
  fields.Add("batch", problem.batch);
  fields.Add("heads_q", problem.heads_q);
  fields.Add("heads_kv", problem.heads_kv);
  fields.Add("len_q", problem.len_q);
  fields.Add("len_k", problem.len_k);
  fields.Add("dim", problem.dim);
  fields.Add("dim_v", problem.dim_v);
}

void AddBytes(const TensorBytes& bytes, Fields& fields) {
  fields.Add("bytes_in", bytes.in);
  fields.Add("bytes_out", bytes.out);
}

bool WantsLine(ServiceContext& context, const Status& status, int64_t total_ns) {
  const uint64_t number = context.small_calls.fetch_add(1, std::memory_order_relaxed);
  return context.access_log != nullptr && context.access_log->Wants(number, !status.ok(), total_ns);
}

// A call's names as text that fields can refer to.
struct CallText {
  CallText(const ServiceContext& context, const CallFacts& facts, const WireCall& call)
      : tenant(context.engine.options().tenants.list()[facts.caller.tenant].name),
        caller(facts.caller.name.get()),
        peer(call.Peer()) {
    const TraceParent from = facts.read ? facts.parent : ParentOf(call);
    const TraceParent& any = facts.own.valid() ? facts.own : from;
    if (any.valid()) trace = TraceIdText(any);
    if (facts.own.valid()) own = SpanIdText(facts.own.span);
    if (from.valid()) parent = SpanIdText(from.span);
  }
  void AddWho(Fields& fields) const {
    fields.Add("tenant", tenant);
    if (caller != nullptr) fields.Add("caller", *caller);
    fields.Add("peer", peer);
  }
  void AddTrace(Fields& fields) const {
    if (!trace.empty()) fields.Add("trace_id", trace);
    if (!own.empty()) fields.Add("span_id", own);
    if (!parent.empty()) fields.Add("parent_span_id", parent);
  }

  const std::string& tenant;
  const std::string* const caller;  // null: not authenticated
  const std::string& peer;
  std::string trace, own, parent;
};

// Adds the times of the phases that the request reached.
void AddTimes(const Request& request, int64_t total_ns, Fields& fields) {
  const bool queued = request.enqueued != TimePoint();
  if (queued) fields.Add("receive_us", Microseconds(request.received, request.enqueued));
  if (request.started != TimePoint()) {
    fields.Add("device", request.device_name);
    fields.Add("kernel", KernelName(request.selection.kernel));
    fields.Add("batch_requests", request.batch_requests);
    fields.Add("queue_us", Microseconds(request.enqueued, request.started));
    fields.Add("copy_in_us", request.copy_in_ns / 1000);
    fields.Add("kernel_us", request.kernel_ns / 1000);
    fields.Add("copy_out_us", request.copy_out_ns / 1000);
  }
  if (request.report.has_value()) fields.Add("check_us", request.check_ns / 1000);
  fields.Add("total_us", total_ns / 1000);
}

void AddStatus(const Status& status, Fields& fields) {
  fields.Add("code", CodeName(status.code()));
  if (status.ok()) return;
  fields.Add("error", std::string_view(status.message()).substr(0, kErrorBytesMax));
}

void AddCall(const CallText& text, const CallFacts& facts, Fields& fields) {
  text.AddTrace(fields);
  text.AddWho(fields);
  fields.Add("method", facts.method.substr(0, kMethodBytesMax));
}

// Logs the event of a call that has failed.
void LogFailure(Logger& logger, const char* event, const Status& status, const CallText& text,
                Fields& fields) {
  const std::string_view code = CodeName(status.code());
  fields.Add("code", code);
  fields.Add("error", status.message());
  text.AddWho(fields);
  text.AddTrace(fields);
  logger.LogGathered(LogLevel::warn, event, fields.get(), code);
}

}  // namespace

void LogEnd(ServiceContext& context, const Request& request, int64_t total_ns,
            int64_t response_bytes, const WireCall& call, const CallFacts& facts) {
  const bool ok = request.status.ok();
  const LogLevel level = ok ? LogLevel::debug : LogLevel::warn;
  const bool event = context.logger.should_log(level);
  const bool line =
      context.access_log != nullptr && context.access_log->Wants(request.id, !ok, total_ns);
  if (!event && !line) return;
  const CallText text(context, facts, call);
  if (line) {
    Fields fields;
    fields.Add("id", request.id);
    fields.Add("request_id", request.request_id);
    AddCall(text, facts, fields);
    fields.Add("transport", TransportName(request.transport));
    AddStatus(request.status, fields);
    AddProblem(request, fields);
    AddBytes(BytesOf(request, response_bytes), fields);
    AddTimes(request, total_ns, fields);
    context.access_log->Write(fields.get());
  }
  if (!event) return;
  Fields fields;
  fields.Add("id", request.id);
  fields.Add("request_id", request.request_id);
  if (!ok) return LogFailure(context.logger, "request failed", request.status, text, fields);
  const std::string problem =
      Describe(request.attention.problem) + (request.backward ? " backward" : "");
  fields.Add("problem", problem);
  fields.Add("kernel", KernelName(request.selection.kernel));
  fields.Add("device", request.device_name);
  fields.Add("batch_requests", request.batch_requests);
  fields.Add("queue_us", Microseconds(request.enqueued, request.started));
  fields.Add("kernel_us", request.kernel_ns / 1000);
  fields.Add("total_us", total_ns / 1000);
  text.AddWho(fields);
  text.AddTrace(fields);
  context.logger.LogGathered(level, "request done", fields.get());
}

void LogRefused(Logger& logger, AccessLog* access_log, const Status& status,
                const RefusedCall& call) {
  Fields fields;
  if (!call.caller.empty()) fields.Add("caller", call.caller);
  if (!call.peer.empty()) fields.Add("peer", call.peer);
  fields.Add("method", call.method.substr(0, kMethodBytesMax));
  AddStatus(status, fields);
  if (access_log != nullptr && access_log->WantsRefused()) access_log->Write(fields.get());
  logger.LogGathered(LogLevel::warn, "caller refused", fields.get(), CodeName(status.code()));
}

void LogEnd(ServiceContext& context, const Status& status, const SmallCallEnd& end,
            const WireCall& call, const CallFacts& facts) {
  const int64_t total_ns = NanosecondsBetween(facts.began, context.clock.Now());
  const bool event = !status.ok() && context.logger.should_log(LogLevel::warn);
  const bool line = WantsLine(context, status, total_ns);
  if (facts.own.valid()) EndSpan(context, status, facts);
  context.metrics.RecordSmallCall(facts.caller.tenant, status.code());
  context.metrics.RecordRejection(RejectionOf(status));
  if (!event && !line) return;
  const CallText text(context, facts, call);
  if (line) {
    Fields fields;
    AddCall(text, facts, fields);
    AddStatus(status, fields);
    AddBytes({end.request_bytes, end.response_bytes}, fields);
    fields.Add("total_us", total_ns / 1000);
    context.access_log->Write(fields.get());
  }
  if (!event) return;
  Fields fields;
  LogFailure(context.logger, end.event, status, text, fields);
}

}  // namespace attend
