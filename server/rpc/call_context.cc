// SPDX-License-Identifier: Apache-2.0
//
// Registers long-lived calls, and records the end of each request: limits are settled first, then
// metrics, log and span see the final status.

#include "server/rpc/call_context.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "server/memory/copy_pieces.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
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

bool OpenStreams::Add(OpenCall* stream) {
  const MutexLock lock(mutex_);
  stream->at_ = stream->entry_.begin();
  streams_.splice(streams_.end(), stream->entry_);
  return ending_;
}

void OpenStreams::Remove(OpenCall* stream) {
  const MutexLock lock(mutex_);
  stream->entry_.splice(stream->entry_.end(), streams_, stream->at_);
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
                                    TimePoint deadline, const Caller& caller) {
  auto request = std::make_unique<Request>();
  request->id = context.next_id.fetch_add(1, std::memory_order_relaxed);
  request->received = context.clock.Now();
  request->deadline = deadline;
  request->responder = &responder;
  SetCaller(caller, *request);
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

RequestEnd EndRequest(ServiceContext& context, std::unique_ptr<Request> request,
                      const WireCall& call, const CallFacts& facts, const MessageFormat& format) {
  const int64_t total_ns = NanosecondsBetween(request->received, context.clock.Now());
  const int64_t bytes = request->status.ok() ? AnswerBytes(*request) : 0;
  RequestEnd end;
  end.span = RecordEnd(context, *request, total_ns, bytes, call, facts, format);
  end.answer_id = format.AnswerId(*request);
  end.status = request->status;
  if (end.status.ok()) {
    end.status = OrOutOfMemory([&] {
      end.answer = format.EncodeReply(std::move(request), total_ns);
      return Status();
    });
  }
  if (request != nullptr) end.refusal = std::move(request->refusal);
  return end;
}

Status RecordRefused(ServiceContext& context, Status status, const WireCall& call,
                     const CallFacts& facts, Transport transport) {
  Request request;
  SetCaller(facts.caller, request);
  request.id = context.next_id.fetch_add(1, std::memory_order_relaxed);
  request.received = context.clock.Now();
  request.transport = transport;
  request.status = std::move(status);
  RecordEnd(context, request, 0, 0, call, facts);
  return request.status;
}

void WriteFiles(WorkerThreads& workers, const MessageFormat& format,
                std::unique_ptr<Request> request,
                const std::function<void(std::unique_ptr<Request>)>& then) {
  const bool wanted = request->status.ok() && request->file_bytes.output > 0 &&
                      !(request->responder != nullptr && request->responder->unwanted());
  if (!wanted) return then(std::move(request));
  // std::function requires a copyable callable.
  const auto held = std::make_shared<std::unique_ptr<Request>>(std::move(request));
  const auto end = [held, then](const Status& copied) {
    if (!copied.ok()) (*held)->status = copied;
    then(std::move(*held));
  };
  bool passed_on = false;
  const Status copied = OrOutOfMemory([&]() -> Status {
    const std::vector<FilePiece> files = format.OutputFiles(**held);
    if (!StaysOnThread((*held)->file_bytes.output)) {
      CopyPieces(workers, {}, files, end);
      passed_on = true;
      return Status();
    }
    for (const FilePiece& file : files) ATTEND_RETURN_IF_ERROR(file.Copy());
    return Status();
  });
  if (!passed_on) end(copied);
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
