// SPDX-License-Identifier: Apache-2.0
//
// Every event changes the state under the mutex and calls AdvanceLocked. `unanswered_` both limits
// reading and keeps the object alive for other threads: it counts each message from OnMessage until
// its answer is written or dropped, and the call can end only when it is 0.

#include "server/rpc/stream_call.h"

#include <cassert>
#include <utility>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/open_stream.h"
#include "server/util/rejection.h"
#include "server/wire/status_text.h"

namespace attend {

StreamCall::StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
                       std::optional<Pass> asked, WireCall&& wire, CountHold hold)
    : context_(context),
      facts_(facts),
      format_(format),
      asked_(asked),
      wire_(std::move(wire)),
      deadline_(wire_.Deadline()),
      hold_(std::move(hold)) {}

void StreamCall::Add(CallTable& table, const char* method, const MessageFormat& format,
                     std::optional<Pass> asked) {
  ServiceContext& context = table.context();
  table.AddLarge(method, [&context, method, &format, asked](ServerCall& call) {
    WireCall wire(call);
    return BeginStream(context, method, wire, [&](const Caller& caller, CountHold hold) {
      return Own(std::make_shared<StreamCall>(context, FactsOfStream(context, method, caller, wire),
                                              format, asked, std::move(wire), std::move(hold)));
    });
  });
}

void StreamCall::Begin() {
  const MutexLock lock(mutex_);
  AdvanceLocked();
}

void StreamCall::EndWhenIdle() {
  const MutexLock lock(mutex_);
  ending_ = true;
  AdvanceLocked();
}

void StreamCall::Recheck() {
  const MutexLock lock(mutex_);
  if (finished_ || stopped_) return;
  if (Status may = caller_.Check(); !may.ok()) stopped_ = std::move(may);
  AdvanceLocked();
}

void StreamCall::AdvanceLocked() {
  if (finished_) return;
  assert(0 <= unanswered_ && unanswered_ <= context_.stream_requests_max);
  while (!writing_ && !answers_.empty() && answers_.begin()->first == next_) {
    const auto next = answers_.extract(answers_.begin());
    ++next_;
    writing_ = next.mapped().has_value();
    if (writing_) wire_.Write(*std::move(next.mapped()));
  }
  const bool over = half_closed_ || broken_ || ending_ || stopped_;
  if (over && unanswered_ == 0 && !writing_) return EndLocked();
  if (over || reading_ || unanswered_ >= context_.stream_requests_max) return;
  reading_ = true;
  wire_.Read();
}

void StreamCall::EndLocked() {
  assert(queued_.empty());
  finished_ = true;
  Status status;
  if (cancelled()) {
    status = Status(Code::kCancelled, "the call was cancelled");
  } else if (stopped_) {
    status = *std::move(stopped_);
  } else if (!half_closed_ && ending_) {
    status = Draining();
  }
  TellLoad(context_, wire_);
  hold_.Release();  // before the client learns of the end and opens another stream
  wire_.End(status);
}

void StreamCall::OnHalfClose() {
  const MutexLock lock(mutex_);
  reading_ = false;
  half_closed_ = true;
  AdvanceLocked();
}

void StreamCall::OnMessage(InMessage message) {
  uint64_t place = 0;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (finished_) return;  // it crossed the end of the call
    ++unanswered_;
    place = read_++;
    AdvanceLocked();  // the next read starts before this message is copied
  }
  std::unique_ptr<Request> request;
  const Status may = OrOutOfMemory([&] {
    Status checked = caller_.Check();
    if (checked.ok()) request = NewRequest(context_, *this, deadline_, facts_.caller);
    return checked;
  });
  if (!may.ok()) return Stop(place, may);  // before the message's request_id is known
  request->answer_place = place;
  request->asked = asked_;
  context_.reader.Accept(Ref(this), format_, std::move(request), std::move(message));
}

std::shared_ptr<MessagePlaces> StreamCall::Place(std::span<const MessagePiece> begun,
                                                 int64_t bytes) {
  return context_.reader.Place(format_, facts_.caller.tenant, begun, bytes);
}

void StreamCall::Stop(uint64_t place, Status status) {
  const MutexLock lock(mutex_);
  if (!stopped_) stopped_ = std::move(status);
  --unanswered_;
  QueueLocked(place, std::nullopt);
  AdvanceLocked();
}

void StreamCall::OnQueueing(uint64_t id) {
  const MutexLock lock(mutex_);
  if (!std::exchange(admitted_, true)) {
    context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
  }
  queued_.push_back(id);
}

void StreamCall::Finish(std::unique_ptr<Request> request) {
  WriteFiles(context_.workers, format_, std::move(request),
             [this](std::unique_ptr<Request> written) { Respond(std::move(written)); });
}

void StreamCall::Respond(std::unique_ptr<Request> request) {
  const std::shared_ptr<StreamCall> self = Ref(this);  // the call may end before this returns
  const uint64_t id = request->id, place = request->answer_place;
  RequestEnd end = EndRequest(context_, std::move(request), wire_, facts_, format_);
  if (!end.status.ok()) {
    end.answer = format_.EncodeFailure(end.answer_id, end.status, end.refusal,
                                       RetryAfterMs(context_, end.status.code(), end.refusal));
  }
  const MutexLock lock(mutex_);
  std::erase(queued_, id);
  if (cancelled()) BreakLocked();  // OnCancel may be about to run
  if (broken_) --unanswered_;
  QueueLocked(place, std::move(end.answer));
  AdvanceLocked();
}

void StreamCall::QueueLocked(uint64_t place, std::optional<OutMessage> answer) {
  if (broken_) return;
  answers_[format_.InOrder() ? place : ready_] = std::move(answer);
  ++ready_;
}

void StreamCall::BreakLocked() {
  broken_ = true;
  for (const auto& [place, answer] : answers_) unanswered_ -= answer ? 1 : 0;
  answers_.clear();
}

void StreamCall::OnWritten(bool ok) {
  const MutexLock lock(mutex_);
  writing_ = false;
  --unanswered_;
  if (!ok) BreakLocked();
  AdvanceLocked();
}

void StreamCall::OnCancel() {
  SetCancelled();
  std::vector<uint64_t> queued;
  {
    const MutexLock lock(mutex_);
    BreakLocked();
    queued = queued_;
    AdvanceLocked();
  }
  for (const uint64_t id : queued) context_.engine.Cancel(id);
}

void StreamCall::OnDone() {
  context_.streams.Remove(this);
  bool admitted = false;
  {
    const MutexLock lock(mutex_);
    admitted = admitted_;
  }
  if (admitted) context_.admitted_calls.fetch_sub(1, std::memory_order_release);
  SharedHandler::OnDone();
}

}  // namespace attend
