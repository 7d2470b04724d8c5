// SPDX-License-Identifier: Apache-2.0
//
// Every event changes the state under the mutex, asks NextLocked for the one step that follows, and
// performs it after unlocking. `unanswered_` both limits reading and keeps the object alive for
// other threads: it counts each message from OnMessage until its answer is written or dropped, and
// the call can finish only when it is 0.

#include "server/rpc/stream_call.h"

#include <cassert>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/open_stream.h"
#include "server/util/rejection.h"
#include "server/wire/status_text.h"

namespace attend {

StreamCall::StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
                       std::optional<Pass> asked, H2Wire&& wire, CountHold hold)
    : context_(context),
      facts_(facts),
      format_(format),
      asked_(asked),
      wire_(std::move(wire)),
      deadline_(wire_.Deadline()),
      hold_(std::move(hold)) {}

CallHandler* StreamCall::Open(ServiceContext& context, std::string_view method,
                              const MessageFormat& format, std::optional<Pass> asked,
                              ServerCall& call) {
  H2Wire wire(call);
  return BeginStream(context, method, wire, [&](const Caller& caller, CountHold hold) {
    return new StreamCall(context, FactsOfStream(context, method, caller, wire), format, asked,
                          std::move(wire), std::move(hold));
  });
}

void StreamCall::Begin() {
  watched_->Join(context_.answers, wire_);
  Step step;
  {
    const MutexLock lock(mutex_);
    step = NextLocked();
  }
  Do(step);
}

void StreamCall::EndWhenIdle() {
  Step step;
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    step = NextLocked();
  }
  Do(step);
}

void StreamCall::Recheck() {
  {
    const MutexLock lock(mutex_);
    if (finished_ || stopped_) return;
  }
  const Status may = caller_.Check();
  if (may.ok()) return;
  Step step;
  {
    const MutexLock lock(mutex_);
    if (!stopped_) stopped_ = may;
    step = NextLocked();
  }
  Do(step);
}

StreamCall::Step StreamCall::NextLocked() {
  if (finished_) return Step::kNone;
  assert(0 <= unanswered_ && unanswered_ <= context_.stream_requests_max);
  assert(std::ssize(answers_) + (writing_ ? 1 : 0) <= unanswered_ &&
         (writing_ || answers_.empty()));
  const bool over = half_closed_ || broken_ || ending_ || stopped_;
  if (over && unanswered_ == 0 && !writing_) {
    assert(queued_.empty());
    finished_ = true;
    return Step::kFinish;
  }
  if (over || reading_ || unanswered_ >= context_.stream_requests_max) return Step::kNone;
  reading_ = true;
  return Step::kRead;
}

void StreamCall::Do(Step step) {
  if (step == Step::kRead) wire_.Read();
  if (step != Step::kFinish) return;
  bool cut_off = false;
  std::optional<Status> stopped;
  {
    const MutexLock lock(mutex_);
    cut_off = !half_closed_ && ending_;
    stopped.swap(stopped_);
  }
  Status status;
  if (cancelled()) {
    status = Status(Code::kCancelled, "the call was cancelled");
  } else if (stopped) {
    status = std::move(*stopped);
  } else if (cut_off) {
    status = Draining();
  }
  TellLoad(context_, wire_);
  hold_.Release();  // before the client learns of the end and opens another stream
  wire_.End(status);
}

void StreamCall::OnHalfClose() {
  Step step;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (finished_) return;  // it crossed the end of the call
    half_closed_ = true;
    step = NextLocked();
  }
  Do(step);
}

void StreamCall::OnMessage(InMessage message) {
  Step step;
  uint64_t place = 0;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (finished_) return;  // it crossed the end of the call
    ++unanswered_;
    place = read_++;
    step = NextLocked();  // the next read starts before this message is copied
  }
  Do(step);
  // The unanswered message keeps the call from finishing, so `this` stays alive until it is
  // answered.
  std::unique_ptr<Request> request;
  const Status may = OrOutOfMemory([&] {
    Status checked = caller_.Check();
    if (checked.ok()) request = NewRequest(context_, *this, deadline_);
    return checked;
  });
  if (!may.ok()) return Stop(place, may);  // before the message's request_id is known
  request->answer_place = place;
  request->asked = asked_;
  SetCaller(facts_.caller, *request);
  request->may_end_in_submit = true;
  request->planner = std::this_thread::get_id();
  context_.reader.Accept(*this, format_, std::move(request), std::move(message));
}

std::shared_ptr<MessagePlaces> StreamCall::Place(std::span<const MessagePiece> begun,
                                                 int64_t bytes) {
  return context_.reader.Place(format_, facts_.caller.tenant, begun, bytes);
}

void StreamCall::Stop(uint64_t place, Status status) {
  std::optional<OutMessage> next;
  Step step;
  {
    const MutexLock lock(mutex_);
    if (!stopped_) stopped_ = std::move(status);
    --unanswered_;
    if (!broken_) QueueLocked(place, std::nullopt);
    next = TakeNextLocked();
    step = NextLocked();
  }
  Write(std::move(next));
  Do(step);
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
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  const bool ok = request->status.ok();  // RecordEnd changes only failures
  const int64_t bytes = ok ? AnswerBytes(*request) : 0;
  const std::unique_ptr<OpenSpan> span =
      RecordEnd(context_, *request, total_ns, bytes, wire_, facts_, format_);
  {
    const MutexLock lock(mutex_);
    std::erase(queued_, request->id);
  }
  if (cancelled()) {
    request.reset();
    std::map<uint64_t, std::optional<OutMessage>> dropped;
    Step step;
    {
      const MutexLock lock(mutex_);
      // OnCancel may be about to run. Until it has, a read begun here could meet the end of the
      // call: this is not the call's loop, so nothing would keep the call alive.
      BreakLocked(dropped);
      --unanswered_;
      step = NextLocked();
    }
    if (step != Step::kNone) Do(step);
    return;
  }
  const uint64_t place = request->answer_place;
  const std::string id = format_.AnswerId(*request);
  Status status = request->status;
  if (ok) {
    OutMessage answer;
    status = OrOutOfMemory([&] {
      answer = format_.EncodeReply(std::move(request), total_ns, watched_);
      return Status();
    });
    if (status.ok()) return Answer(place, std::move(answer));
  }
  const Refusal refusal = request == nullptr ? Refusal() : request->refusal;
  request.reset();  // frees its memory before the client learns of the failure and retries
  Answer(place, format_.EncodeFailure(id, status, refusal,
                                      RetryAfterMs(context_, status.code(), refusal)));
}

void StreamCall::QueueLocked(uint64_t place, std::optional<OutMessage> answer) {
  if (!format_.InOrder()) {
    if (answer) answers_.push_back(std::move(*answer));
    return;
  }
  early_[place] = std::move(answer);
  while (!early_.empty() && early_.begin()->first == next_place_) {
    std::optional<OutMessage>& next = early_.begin()->second;
    if (next) answers_.push_back(std::move(*next));
    early_.erase(early_.begin());
    ++next_place_;
  }
}

void StreamCall::BreakLocked(std::map<uint64_t, std::optional<OutMessage>>& dropped) {
  broken_ = true;
  for (const auto& [place, answer] : early_) unanswered_ -= answer ? 1 : 0;
  dropped.swap(early_);
}

std::optional<OutMessage> StreamCall::TakeNextLocked() {
  if (writing_ || answers_.empty()) return std::nullopt;
  writing_ = true;
  std::optional<OutMessage> next = std::move(answers_.front());
  answers_.pop_front();
  return next;
}

void StreamCall::Write(std::optional<OutMessage> answer) {
  if (!answer) return;
  watched_->Hold(1);  // until OnWritten
  wire_.Write(std::move(*answer));
}

void StreamCall::Answer(uint64_t place, OutMessage answer) {
  std::optional<OutMessage> next;
  Step step = Step::kNone;
  {
    const MutexLock lock(mutex_);
    if (broken_) {
      --unanswered_;
      step = NextLocked();
    } else {
      QueueLocked(place, std::move(answer));
      next = TakeNextLocked();
    }
  }
  Write(std::move(next));
  if (step != Step::kNone) Do(step);
}

void StreamCall::OnWritten(bool ok) {
  watched_->Release(1);
  std::optional<OutMessage> next;
  std::deque<OutMessage> dropped;  // released outside the lock
  std::map<uint64_t, std::optional<OutMessage>> dropped_early;
  Step step;
  {
    const MutexLock lock(mutex_);
    writing_ = false;
    --unanswered_;
    if (!ok) {
      BreakLocked(dropped_early);
      unanswered_ -= static_cast<int64_t>(answers_.size());
      dropped.swap(answers_);
    }
    next = TakeNextLocked();
    step = NextLocked();
  }
  Write(std::move(next));
  Do(step);
}

void StreamCall::OnCancel() {
  SetCancelled();
  std::vector<uint64_t> queued;
  std::map<uint64_t, std::optional<OutMessage>> dropped;
  Step step;
  {
    const MutexLock lock(mutex_);
    BreakLocked(dropped);
    queued = queued_;
    step = NextLocked();
  }
  for (const uint64_t id : queued) context_.engine.Cancel(id);
  Do(step);
}

void StreamCall::OnDone() {
  watched_->Leave();
  context_.streams.Remove(this);
  bool admitted = false;
  {
    const MutexLock lock(mutex_);
    admitted = admitted_;
  }
  if (admitted) context_.admitted_calls.fetch_sub(1, std::memory_order_release);
  Unref();
}

}  // namespace attend
