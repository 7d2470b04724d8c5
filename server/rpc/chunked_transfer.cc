// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/chunked_transfer.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <utility>

#include "server/rpc/call_caller.h"
#include "server/rpc/chunked_registry.h"
#include "server/util/thresholds.h"
#include "server/wire/reply_codec.h"

namespace attend {

ChunkedTransfer::ChunkedTransfer(ServiceContext& context, const CallFacts& facts,
                                 const grpc::CallbackServerContext& call, TimePoint deadline,
                                 std::shared_ptr<TransferStream> first)
    : context_(context), facts_(facts), call_(call), deadline_(deadline) {
  streams_.push_back(std::move(first));
  request_ = NewRequest(context_, *this, deadline);
  request_->transport = Transport::kChunked;
  SetCaller(facts_.caller, *request_);
  id_ = request_->id;
}

ChunkedTransfer::~ChunkedTransfer() {
  span_.reset();  // before a drain takes the call for ended
  if (queued_) context_.admitted_calls.fetch_sub(1, std::memory_order_release);
}

void ChunkedTransfer::Begin(const FirstMessage& first, Status parsed) {
  const TransferRef self(this);
  MutexLock lock(mutex_);
  Request& request = *request_;  // nobody else looks at it while the header is in hand
  lock.Unlock();
  request.message_bytes = first.message_bytes();
  if (!parsed.ok()) {
    FailUpload(Rejection::kInvalid, std::move(parsed));
  } else if (Status status = Admit(first.header(), request); !status.ok()) {
    Fail(std::move(status));
  }
  Placed(0);
  AdvanceAll();
}

Status ChunkedTransfer::Admit(const RequestMessage& header, Request& request) {
  {
    // Do not take memory for a request that was cancelled while it waited for this thread.
    const MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  if (deadline_ != kNever && deadline_ <= context_.clock.Now()) {
    return context_.reader.Reject(
        Rejection::kDeadlinePassed,
        Status(Code::kDeadlineExceeded, "the deadline had passed on arrival"));
  }
  TensorPlaces places;
  ATTEND_RETURN_IF_ERROR(context_.reader.AcceptHeader(header, request, places));
  Result<std::string> token = context_.chunked.Add(*this);
  if (!token.ok()) return token.status();
  const MutexLock lock(mutex_);
  token_ = std::move(*token);
  places_ = UploadPlaces(places);
  progress_step_bytes_ = std::max(thresholds::kUploadProgressBytesMin,
                                  places_.total_bytes() / thresholds::kUploadProgressParts);
  progress_ = context_.clock.Now();
  answer_ = AnswerChunks(OutputsOf(request), std::move(request.output));
  if (StagedUpload* const staged = request.source.staged()) run_ = staged->run;
  // This transfer outlives the parts, see WhenIdle.
  if (run_ != nullptr) run_->OnPartEnded([this](const Request& part) { TakePart(part); });
  phase_ = Phase::kUploading;
  return Status();
}

Status ChunkedTransfer::Join(std::shared_ptr<TransferStream> stream) {
  const MutexLock lock(mutex_);
  if (phase_ == Phase::kEnded) return Status(Code::kNotFound, "the token's request has ended");
  const int64_t streams_max = context_.chunked.options().streams_max;
  if (joined_ >= streams_max) {
    return InvalidArgument("the request has had " + std::to_string(joined_) +
                           " streams, may have at most " + std::to_string(streams_max) +
                           " (chunked-streams-max)");
  }
  ++joined_;
  ++open_;
  streams_.push_back(std::move(stream));
  return Status();
}

void ChunkedTransfer::Leave(const TransferStream* stream) {
  std::string token;
  std::shared_ptr<TransferStream> gone;  // released outside the lock
  {
    const MutexLock lock(mutex_);
    const auto found = std::find_if(streams_.begin(), streams_.end(),
                                    [&](const auto& each) { return each.get() == stream; });
    if (found != streams_.end()) {
      gone = std::move(*found);
      streams_.erase(found);
    }
    if (streams_.empty()) token = token_;  // nobody is left to hear the answer
  }
  if (!token.empty()) context_.chunked.Remove(token);
}

Status ChunkedTransfer::Reserve(const ChunkMessage& chunk, ChunkPlace* place) {
  const MutexLock lock(mutex_);
  if (phase_ != Phase::kUploading || !failure_.ok()) return Status();
  Result<char*> data = places_.Reserve(chunk);
  if (!data.ok()) return data.status();
  request_->message_bytes += chunk.message_bytes();
  ++in_hand_;
  *place = {*data, UploadSink(request_->source)};
  return Status();
}

void ChunkedTransfer::Placed(int64_t bytes) {
  MutexLock lock(mutex_);
  --in_hand_;
  placed_bytes_ += bytes;
  assert(in_hand_ >= 0 && placed_bytes_ <= places_.total_bytes());
  if (placed_bytes_ - progress_bytes_ >= progress_step_bytes_) {
    progress_bytes_ = placed_bytes_;
    progress_ = context_.clock.Now();
  }
  const bool failed = !failure_.ok();
  Rest rest;
  if (phase_ == Phase::kUploading && !failed && placed_bytes_ == places_.total_bytes()) {
    phase_ = Phase::kRunning;
    rest = {.kind = Rest::kSubmit, .request = std::move(request_)};
  } else if (in_hand_ == 0 && phase_ <= Phase::kUploading && failed) {
    rest = EndUploadLocked();
  } else if (in_hand_ == 0 && phase_ == Phase::kUploading && open_ == 0) {
    rest = FailUploadLocked(Rejection::kInvalid, MissingLocked());
  }
  lock.Unlock();
  Do(std::move(rest));
}

void ChunkedTransfer::HalfClosed() {
  MutexLock lock(mutex_);
  --open_;
  if (open_ > 0 || in_hand_ > 0 || phase_ != Phase::kUploading || !failure_.ok()) return;
  Rest rest = FailUploadLocked(Rejection::kInvalid, MissingLocked());
  lock.Unlock();
  Do(std::move(rest));
}

Status ChunkedTransfer::MissingLocked() const {
  return InvalidArgument("all streams are half-closed, and bytes are missing: " +
                         places_.MissingText());
}

void ChunkedTransfer::Fail(Status status) {
  MutexLock lock(mutex_);
  Rest rest = FailLocked(std::move(status));
  lock.Unlock();
  Do(std::move(rest));
}

void ChunkedTransfer::FailCancelled() {
  MutexLock lock(mutex_);
  unread_ = true;
  lock.Unlock();
  const bool late = deadline_ != kNever && deadline_ <= context_.clock.Now();
  Fail(late ? Status(Code::kDeadlineExceeded, "the deadline passed")
            : Status(Code::kCancelled, "a stream of the request was cancelled or lost"));
  AdvanceAll();
}

void ChunkedTransfer::FailUpload(Reason reason, Status status, int64_t message_bytes) {
  MutexLock lock(mutex_);
  if (phase_ == Phase::kUploading && request_ != nullptr) request_->message_bytes += message_bytes;
  Rest rest = FailUploadLocked(reason, std::move(status));
  lock.Unlock();
  Do(std::move(rest));
}

ChunkedTransfer::Rest ChunkedTransfer::FailUploadLocked(Reason reason, Status status) {
  if (phase_ > Phase::kUploading || !failure_.ok()) return {};
  if (reason) status = context_.reader.Reject(*reason, std::move(status));
  return FailLocked(std::move(status));
}

void ChunkedTransfer::EndIfIdle(TimePoint now) {
  MutexLock lock(mutex_);
  const Duration timeout = context_.chunked.options().idle_timeout;
  if (phase_ == Phase::kEnded && !unread_ && now - progress_ >= timeout) {
    unread_ = true;
    lock.Unlock();
    return AdvanceAll();
  }
  if (phase_ != Phase::kUploading || in_hand_ > 0 || now - progress_ < timeout) return;
  Rest rest = FailLocked(Status(
      Code::kDeadlineExceeded,
      "fewer than " + std::to_string(progress_step_bytes_) + " bytes came in " +
          std::to_string(timeout / std::chrono::milliseconds(1)) + " ms (chunked-idle-timeout), " +
          std::to_string(places_.total_bytes() - placed_bytes_) + " of " +
          std::to_string(places_.total_bytes()) + " are missing"));
  lock.Unlock();
  Do(std::move(rest));
}

ChunkedTransfer::Rest ChunkedTransfer::FailLocked(Status status) {
  if (phase_ >= Phase::kEnding || !failure_.ok()) return {};
  failure_ = std::move(status);
  switch (phase_) {
    case Phase::kAdmitting:  // Begin's Placed() ends it
    case Phase::kUploading:  // a copy may still write there: then the last Placed() ends it
      return in_hand_ == 0 ? EndUploadLocked() : Rest();
    case Phase::kRunning:
      SetCancelled();  // before Submit checks for the last time
      return {.kind = Rest::kCancel, .run = run_, .queued = queued_, .status = failure_};
    default:  // kAnswering
      phase_ = Phase::kEnded;
      return {.kind = Rest::kAdvance, .dropped = std::exchange(answer_, AnswerChunks())};
  }
}

ChunkedTransfer::Rest ChunkedTransfer::EndUploadLocked() {
  assert(phase_ <= Phase::kUploading && in_hand_ == 0 && !failure_.ok());
  phase_ = Phase::kEnding;
  request_->status = failure_;
  return {.kind = Rest::kEndUpload, .request = std::move(request_), .run = run_};
}

void ChunkedTransfer::Do(Rest rest) {
  switch (rest.kind) {
    case Rest::kNone:
      return;
    case Rest::kSubmit: {
      const TransferRef self(this);
      Ref();  // adopted by Ended
      return context_.reader.Submit(*this, std::move(rest.request));
    }
    case Rest::kEndUpload:
      return WhenIdle(rest.run, std::move(rest.request), &ChunkedTransfer::UploadEnded);
    case Rest::kCancel:
      if (rest.queued) context_.engine.Cancel(id_);  // if not yet queued, Submit sees it
      if (rest.run != nullptr) rest.run->Cancel(std::move(rest.status));
      return;
    case Rest::kAdvance:
      return AdvanceAll();
  }
}

void ChunkedTransfer::WhenIdle(const std::shared_ptr<UploadRun>& run,
                               std::unique_ptr<Request> request, Then then) {
  if (run == nullptr) return (this->*then)(std::move(request));
  // A std::function must be copyable, hence the shared_ptr; the request still has a single owner.
  const auto held = std::make_shared<std::unique_ptr<Request>>(std::move(request));
  run->Stop([this, held, then] { (this->*then)(std::move(*held)); });
}

void ChunkedTransfer::UploadEnded(std::unique_ptr<Request> request) {
  const TransferRef self(this);
  // Before any stream may finish: call_, whose peer the record names, is the first one's.
  RecordEnd(context_, *request, NanosecondsBetween(request->received, context_.clock.Now()), 0,
            call_, facts_);
  Refusal refusal = std::move(request->refusal);
  request.reset();  // frees its memory before the client is told and retries
  DropAnswer();
  MutexLock lock(mutex_);
  refusal_ = std::move(refusal);
  phase_ = Phase::kEnded;
  progress_ = context_.clock.Now();
  lock.Unlock();
  AdvanceAll();
}

void ChunkedTransfer::DropAnswer() {
  AnswerChunks dropped;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  std::swap(dropped, answer_);
}

StreamStep ChunkedTransfer::Next(bool first, bool granted, const WatchedRef& call) {
  const MutexLock lock(mutex_);
  StreamStep step;
  if (phase_ == Phase::kEnded) {
    return {.kind = StreamStep::Kind::kFinish, .status = failure_, .refusal = refusal_};
  }
  if (phase_ == Phase::kAdmitting || phase_ == Phase::kEnding) return step;
  if (!granted) {
    step.kind = StreamStep::Kind::kWrite;
    const ChunkedOptions& options = context_.chunked.options();
    step.message = EncodeGrant(first ? token_ : "", options.streams_max, options.chunk_bytes_max,
                               options.idle_timeout / std::chrono::milliseconds(1));
    return step;
  }
  const bool answering = phase_ == Phase::kAnswering;
  if (first && !answering) return step;  // parts' answers may not precede the header here
  if (first && std::exchange(header_due_, false)) {
    step.kind = StreamStep::Kind::kWrite;
    step.message.Swap(&header_);
    return step;
  }
  if (failure_.ok()) step = NextChunkLocked(call);
  if (step.kind != StreamStep::Kind::kNone || !answering) return step;
  // The first stream's status is the request's, so it finishes last.
  if (first && writing_ > 0) return step;
  if (first) phase_ = Phase::kEnded;
  step.kind = StreamStep::Kind::kFinish;
  return step;
}

StreamStep ChunkedTransfer::NextChunkLocked(const WatchedRef& call) {
  StreamStep step;
  if (answer_.empty()) {
    // gRPC keeps what it has not sent.
    if (phase_ == Phase::kAnswering) answer_ = AnswerChunks();
    return step;
  }
  step.kind = StreamStep::Kind::kWrite;
  step.chunk = true;
  step.message = answer_.Next(thresholds::kAnswerChunkBytes, call);
  ++writing_;
  return step;
}

void ChunkedTransfer::Written(bool ok) {
  MutexLock lock(mutex_);
  const bool last = --writing_ == 0 && phase_ == Phase::kAnswering;
  lock.Unlock();
  if (!ok) return FailCancelled();
  if (last) AdvanceAll();
}

void ChunkedTransfer::OnQueueing(uint64_t) {
  context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  queued_ = true;
}

void ChunkedTransfer::TakePart(const Request& part) {
  if (!part.status.ok()) return Fail(part.status);
  MutexLock lock(mutex_);
  if (!failure_.ok()) return;
  answer_.Add(OutputsOf(part));
  lock.Unlock();
  AdvanceAll();
}

void ChunkedTransfer::Finish(std::unique_ptr<Request> request) {
  MutexLock lock(mutex_);
  // Set before WhenIdle, so that parts that it drops do not become the reason.
  if (failure_.ok()) failure_ = request->status;
  const std::shared_ptr<UploadRun> run = run_;
  lock.Unlock();
  WhenIdle(run, std::move(request), &ChunkedTransfer::Ended);
}

void ChunkedTransfer::Ended(std::unique_ptr<Request> request) {
  const TransferRef self = TransferRef::Adopt(this);  // from Do
  {
    const MutexLock lock(mutex_);
    if (!failure_.ok()) request->status = failure_;
    refusal_ = std::move(request->refusal);
  }
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  span_ = RecordEnd(context_, *request, total_ns, request->status.ok() ? AnswerBytes(*request) : 0,
                    call_, facts_);
  const Status status = request->status;
  grpc::ByteBuffer header;
  if (status.ok()) {
    v1::AttendResponse response;
    FillResponse(*request, total_ns, &response);
    header = EncodeChunkedHeader(&response);
  }
  const AnswerChunks::Tensors whole = OutputsOf(*request);
  const bool by_parts = request->source.run() != nullptr;  // whose answers are in answer_
  request.reset();                 // frees the input block before the answer is sent
  if (!status.ok()) DropAnswer();  // before any stream can finish
  {
    AnswerChunks unwanted;
    const MutexLock lock(mutex_);
    assert(phase_ == Phase::kRunning);
    phase_ = failure_.ok() ? Phase::kAnswering : Phase::kEnded;
    progress_ = context_.clock.Now();
    if (failure_.ok()) {
      header_.Swap(&header);
      header_due_ = true;
      if (!by_parts) answer_.Add(whole);
    } else {
      std::swap(unwanted, answer_);
    }
  }
  AdvanceAll();
}

void ChunkedTransfer::AdvanceAll() {
  MutexLock lock(mutex_);
  const std::vector<std::shared_ptr<TransferStream>> streams = streams_;
  lock.Unlock();
  for (const std::shared_ptr<TransferStream>& stream : streams) stream->Advance();
}

}  // namespace attend
