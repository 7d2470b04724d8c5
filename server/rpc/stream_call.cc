// SPDX-License-Identifier: Apache-2.0

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
#include "server/wire/grpc_status.h"

namespace attend {

StreamCall::StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
                       std::optional<Pass> asked, StreamWire& wire, CountHold hold)
    : context_(context),
      facts_(facts),
      format_(format),
      asked_(asked),
      wire_(wire),
      deadline_(wire.call().Deadline(context.clock)),
      hold_(std::move(hold)) {}

Status StreamCall::Open(ServiceContext& context, std::string_view method,
                        const MessageFormat& format, std::optional<Pass> asked, StreamWire& wire) {
  return BeginStream(context, method, wire.call(), [&](const Caller& caller, CountHold hold) {
    auto* const stream =
        new StreamCall(context, FactsOfStream(context, method, caller, wire.call()), format, asked,
                       wire, std::move(hold));
    wire.Give(*stream);
    return stream;
  });
}

void StreamCall::Begin() {
  watched_->Join(context_.answers, wire_.call());
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
    if (!stopped_) stopped_ = ToGrpc(may);
    step = NextLocked();
  }
  Do(step);
}

StreamCall::Step StreamCall::NextLocked() {
  if (finished_) return Step::kNone;
  assert(0 <= unanswered_ && unanswered_ <= context_.stream_requests_max);
  assert(std::ssize(answers_) <= unanswered_ && writing_ == !answers_.empty());
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
  if (step == Step::kRead) wire_.Read(&incoming_);
  if (step != Step::kFinish) return;
  bool cut_off = false;
  std::optional<grpc::Status> stopped;
  {
    const MutexLock lock(mutex_);
    cut_off = !half_closed_ && ending_;
    stopped.swap(stopped_);
  }
  grpc::Status status;
  if (cancelled()) {
    status = grpc::Status(grpc::StatusCode::CANCELLED, "the call was cancelled");
  } else if (stopped) {
    status = std::move(*stopped);
  } else if (cut_off) {
    status = ToGrpc(Draining());
  }
  TellLoad(context_, wire_.call());
  hold_.Release();  // before the client hears of it and opens another
  wire_.End(status);
}

void StreamCall::OnReadDone(bool ok) {
  if (ok) return OnMessage({});
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

bool StreamCall::OnLent(std::string_view message) {
  OnMessage(message);
  return true;
}

void StreamCall::OnMessage(std::string_view lent) {
  grpc::ByteBuffer message;
  Step step;
  uint64_t place = 0;
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (finished_) return;  // it crossed the end of the call
    ++unanswered_;
    place = read_++;
    message.Swap(&incoming_);
    step = NextLocked();  // the next read is under way before this message is copied
  }
  Do(step);
  // The unanswered message keeps the call from finishing, so `this` stays until it is answered.
  std::unique_ptr<Request> request;
  const Status may = OrOutOfMemory([&] {
    Status checked = caller_.Check();
    if (checked.ok()) request = NewRequest(context_, *this, deadline_);
    return checked;
  });
  if (!may.ok()) return Stop(place, ToGrpc(may));  // before the message's request_id is known
  request->answer_place = place;
  request->asked = asked_;
  SetCaller(facts_.caller, *request);
  request->may_end_in_submit = true;
  if (wire_.call().PlansNow()) request->planner = std::this_thread::get_id();
  context_.reader.Accept(*this, format_, std::move(request),
                         {lent.data() == nullptr ? &message : nullptr, lent});
}

void StreamCall::Stop(uint64_t place, grpc::Status status) {
  const grpc::ByteBuffer* first = nullptr;
  Step step;
  {
    const MutexLock lock(mutex_);
    if (!stopped_) stopped_ = std::move(status);
    --unanswered_;
    const bool writing = !answers_.empty();
    if (!broken_) QueueLocked(place, nullptr);
    if (!writing && !answers_.empty()) {
      writing_ = true;
      first = &answers_.front();
    }
    step = NextLocked();
  }
  if (first != nullptr) Write(first);
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
  const bool ok = request->status.ok();  // RecordEnd changes failures alone
  const int64_t bytes = ok ? AnswerBytes(*request) : 0;
  const std::unique_ptr<OpenSpan> span =
      RecordEnd(context_, *request, total_ns, bytes, wire_.call(), facts_, format_);
  {
    const MutexLock lock(mutex_);
    std::erase(queued_, request->id);
  }
  if (cancelled()) {
    request.reset();
    std::map<uint64_t, std::optional<grpc::ByteBuffer>> dropped;
    Step step;
    {
      const MutexLock lock(mutex_);
      // OnCancel may be on its way to say so. Until it has, a read begun here could meet the call's
      // end: this thread is not gRPC's, so nothing would keep the call alive.
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
    grpc::ByteBuffer answer;
    status = OrOutOfMemory([&] {
      grpc::ByteBuffer made = format_.EncodeReply(std::move(request), total_ns, watched_);
      answer.Swap(&made);  // the only way without a copy
      return Status();
    });
    if (status.ok()) return Answer(place, answer);
  }
  const Refusal refusal = request == nullptr ? Refusal() : request->refusal;
  request.reset();  // its memory before the client hears of it and tries again
  grpc::ByteBuffer failure =
      format_.EncodeFailure(id, status, refusal, RetryAfterMs(context_, status.code(), refusal));
  Answer(place, failure);
}

void StreamCall::QueueLocked(uint64_t place, grpc::ByteBuffer* answer) {
  if (!format_.InOrder()) {
    if (answer != nullptr) answers_.emplace_back().Swap(answer);
    return;
  }
  std::optional<grpc::ByteBuffer>& early = early_[place];
  if (answer != nullptr) early.emplace().Swap(answer);
  while (!early_.empty() && early_.begin()->first == next_place_) {
    std::optional<grpc::ByteBuffer>& next = early_.begin()->second;
    if (next) answers_.emplace_back().Swap(&*next);
    early_.erase(early_.begin());
    ++next_place_;
  }
}

void StreamCall::BreakLocked(std::map<uint64_t, std::optional<grpc::ByteBuffer>>& dropped) {
  broken_ = true;
  for (const auto& [place, answer] : early_) unanswered_ -= answer ? 1 : 0;
  dropped.swap(early_);
}

void StreamCall::Answer(uint64_t place, grpc::ByteBuffer& answer) {
  const grpc::ByteBuffer* first = nullptr;
  Step step = Step::kNone;
  {
    const MutexLock lock(mutex_);
    if (broken_) {
      --unanswered_;
      step = NextLocked();
    } else {
      QueueLocked(place, &answer);
      if (!writing_ && !answers_.empty()) {
        writing_ = true;
        first = &answers_.front();
      }
    }
  }
  // Nothing of this object after either: the stream may end, and the object with it, meanwhile.
  if (first != nullptr) {
    Write(first);
  } else if (step != Step::kNone) {
    Do(step);
  }
}

void StreamCall::Write(const grpc::ByteBuffer* answer, bool hurries) {
  watched_->Hold(1);  // until OnWriteDone
  wire_.Write(answer, hurries);
}

void StreamCall::OnWriteDone(bool ok) {
  watched_->Release(1);
  const grpc::ByteBuffer* next = nullptr;
  bool hurries = true;
  grpc::ByteBuffer written;  // let go of outside the lock
  std::deque<grpc::ByteBuffer> dropped;
  std::map<uint64_t, std::optional<grpc::ByteBuffer>> dropped_early;
  Step step;
  {
    const MutexLock lock(mutex_);
    written.Swap(&answers_.front());
    answers_.pop_front();
    --unanswered_;
    if (!ok) {
      BreakLocked(dropped_early);
      unanswered_ -= static_cast<int64_t>(answers_.size());
      dropped.swap(answers_);
    }
    writing_ = !answers_.empty();
    if (writing_) next = &answers_.front();
    // One more follows at once: both in one system call.
    if (answers_.size() > 1) hurries = false;
    step = NextLocked();
  }
  if (next != nullptr) Write(next, hurries);
  Do(step);
}

void StreamCall::OnCancel() {
  SetCancelled();
  std::vector<uint64_t> queued;
  std::map<uint64_t, std::optional<grpc::ByteBuffer>> dropped;
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
