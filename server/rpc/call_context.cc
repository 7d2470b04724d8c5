// SPDX-License-Identifier: Apache-2.0
//
// Registers long-lived calls, and records the end of each request: limits are settled first, then
// metrics, log and span see the final status.

#include "server/rpc/call_context.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "server/memory/copy_pieces.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_spans.h"
#include "server/wire/reply_codec.h"
#include "server/wire/status_text.h"

namespace attend {
namespace {

constexpr char kRetryPushbackKey[] = "grpc-retry-pushback-ms";
constexpr char kStatusKey[] = "attend-status-bin";

// Refunds to the tenant what the request did not use: its cost unless it started; its bytes only if
// the server refused it, and only those that had not arrived. An upload given up by its client is
// charged in full, as parts of it may have run.
void EndLimits(TenantLimits& limits, Request& request) {
  if (!request.limits.has_place()) {
    return limits.Came(request.tenant, request.message_bytes);
  }
  const bool started = request.started != TimePoint();
  const bool refused = !started && IsRetryable(request.status.code());
  const bool cost_used = request.transport == Transport::kChunked ? !refused : started;
  request.limits.End(request.message_bytes, /*bytes_used=*/!refused, cost_used);
}

}  // namespace

OpenStreams::Place OpenStreams::MakePlace() {
  std::set<OpenCall*> one = {nullptr};
  return one.extract(one.begin());
}

bool OpenStreams::Add(Place place, OpenCall* stream) {
  place.value() = stream;
  const MutexLock lock(mutex_);
  streams_.insert(std::move(place));
  return ending_;
}

void OpenStreams::Remove(OpenCall* stream) {
  const MutexLock lock(mutex_);
  streams_.erase(stream);
}

void OpenStreams::EndAll() {
  const MutexLock lock(mutex_);
  ending_ = true;
  // Under the lock, so that no stream is deleted: Remove() waits.
  for (OpenCall* stream : streams_) stream->EndWhenIdle();
}

void OpenStreams::RecheckAll() {
  const MutexLock lock(mutex_);
  for (OpenCall* stream : streams_) stream->Recheck();
}

void OpenStreams::Resume() {
  const MutexLock lock(mutex_);
  ending_ = false;
}

std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline) {
  auto request = std::make_unique<Request>();
  request->id = context.next_id.fetch_add(1, std::memory_order_relaxed);
  request->received = context.clock.Now();
  request->deadline = deadline;
  request->responder = &responder;
  return request;
}

std::unique_ptr<OpenSpan> RecordEnd(ServiceContext& context, Request& request, int64_t total_ns,
                                    int64_t response_bytes, const WireCall& call,
                                    const CallFacts& of_call, const MessageFormat& format) {
  if (request.status.code() == Code::kCancelled && CancelledLate(request, context.clock.Now())) {
    request.status = Status(Code::kDeadlineExceeded,
                            "the client's deadline passed: " + request.status.message());
  }
  EndLimits(context.limits, request);
  request.sessions_ending = request.source.cache() != nullptr && context.engine.draining();
  context.metrics.RecordFinished(request, total_ns, response_bytes);
  format.CountEnd(request, total_ns);
  CallFacts facts = of_call;
  if (facts.stream && context.tracer != nullptr) facts.own = context.tracer->Begin(facts.parent);
  LogEnd(context, request, total_ns, response_bytes, call, facts);
  return SpanOf(context, request, response_bytes, facts);
}

void WriteFiles(WorkerThreads& workers, const MessageFormat& format,
                std::unique_ptr<Request> request,
                const std::function<void(std::unique_ptr<Request>)>& then) {
  const bool wanted = request->status.ok() && request->file_bytes.output > 0 &&
                      !(request->responder != nullptr && request->responder->unwanted());
  if (!wanted) return then(std::move(request));
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const std::vector<FilePiece> files = format.OutputFiles(*request);
    if (!StaysOnThread(request->file_bytes.output)) {
      // std::function requires a copyable callable.
      const auto held = std::make_shared<std::unique_ptr<Request>>(std::move(request));
      try {
        return CopyPieces(workers, {}, files, [held, then](const Status& copied) {
          if (!copied.ok()) (*held)->status = copied;
          then(std::move(*held));
        });
      } catch (const std::bad_alloc&) {
        request = std::move(*held);
        throw;
      }
    }
    for (const FilePiece& file : files) {
      request->status = file.Copy();
      if (!request->status.ok()) break;
    }
  } catch (const std::bad_alloc&) {
    request->status = ResourceExhausted("no memory for the answer");
  }
  then(std::move(request));
}

int64_t RetryAfterMs(const ServiceContext& context, Code code, const Refusal& refusal) {
  if (!IsRetryable(code)) return 0;
  return refusal.retry_after_ms > 0 ? refusal.retry_after_ms : context.engine.RetryAfterMs(code);
}

void AddRefusal(ServiceContext& context, Code code, const Refusal& refusal, const WireCall& call) {
  const int64_t retry_after_ms = RetryAfterMs(context, code, refusal);
  if (retry_after_ms > 0) {
    call.AddTrailingMetadata(kRetryPushbackKey, std::to_string(retry_after_ms));
  }
  if (refusal.lengths.empty() && refusal.missing_bytes == 0) return;
  v1::RequestStatus status;
  FillRefusal(refusal, status);
  call.AddTrailingMetadata(kStatusKey, status.SerializeAsString());
}

}  // namespace attend
