// SPDX-License-Identifier: Apache-2.0
//
// Every public function changes the state under the mutex and then calls Settle, which does what
// follows from it after unlocking. So callbacks from streams and the engine cannot deadlock. The
// request's memory is freed only after in_hand_ has dropped to 0, since copies may still be writing
// to it.

#include "server/rpc/chunked_transfer.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/chunked_registry.h"
#include "server/util/thresholds.h"
#include "server/wire/reply_codec.h"

namespace attend {

ChunkedTransfer::ChunkedTransfer(ServiceContext& context, const CallFacts& facts,
                                 const WireCall& call, TimePoint deadline,
                                 std::shared_ptr<TransferStream> first)
    : context_(context), facts_(facts), call_(call), deadline_(deadline) {
  streams_.push_back(std::move(first));
  request_ = NewRequest(context_, *this, deadline, facts_.caller);
  request_->transport = Transport::kChunked;
  id_ = request_->id;
}

ChunkedTransfer::~ChunkedTransfer() {
  span_.reset();  // before a drain considers the call ended
  if (queued_) context_.admitted_calls.fetch_sub(1, std::memory_order_release);
}

void ChunkedTransfer::Begin(const FirstMessage& first, Status parsed) {
  MutexLock lock(mutex_);
  Request& request = *request_;  // not shared until the header has been processed
  lock.Unlock();
  request.message_bytes = first.message_bytes();
  if (!parsed.ok()) {
    FailUpload(std::move(parsed));
  } else if (Status status = Admit(first.header(), request); !status.ok()) {
    Fail(std::move(status));
  }
  Placed(0);
  AdvanceAll();
}

Status ChunkedTransfer::Admit(const RequestMessage& header, Request& request) {
  {
    // Take no memory for a request that was cancelled while it waited for this thread.
    const MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  ATTEND_RETURN_IF_ERROR(CheckArrival(deadline_, context_.clock.Now()));
  TensorPlaces places;
  ATTEND_RETURN_IF_ERROR(
      OrOutOfMemory([&] { return context_.reader.AcceptHeader(header, request, places); }));
  Result<std::string> token = context_.chunked.Add(shared_from_this());
  if (!token.ok()) return token.status();
  const MutexLock lock(mutex_);
  token_ = std::move(*token);
  places_ = UploadPlaces(places);
  progress_step_bytes_ = std::max(thresholds::kUploadProgressBytesMin,
                                  places_.total_bytes() / thresholds::kUploadProgressParts);
  progress_ = context_.clock.Now();
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
    if (streams_.empty()) token = token_;  // no stream is left for the answer
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
  *place = {*data, chunk.bytes() == 0 ? nullptr : request_->source.copy()};
  return Status();
}

void ChunkedTransfer::Placed(int64_t bytes) {
  {
    const MutexLock lock(mutex_);
    --in_hand_;
    placed_bytes_ += bytes;
    assert(in_hand_ >= 0 && placed_bytes_ <= places_.total_bytes());
    if (placed_bytes_ - progress_bytes_ >= progress_step_bytes_) {
      progress_bytes_ = placed_bytes_;
      progress_ = context_.clock.Now();
    }
  }
  Settle();
}

void ChunkedTransfer::HalfClosed() {
  {
    const MutexLock lock(mutex_);
    --open_;
  }
  Settle();
}

Status ChunkedTransfer::MissingLocked() const {
  return InvalidArgument("all streams are half-closed, but bytes are missing: " +
                         places_.MissingText());
}

void ChunkedTransfer::Fail(Status status) {
  {
    const MutexLock lock(mutex_);
    FailLocked(std::move(status));
  }
  Settle();
}

void ChunkedTransfer::FailCancelled() {
  const bool late = deadline_ != kNever && deadline_ <= context_.clock.Now();
  Fail(late ? Status(Code::kDeadlineExceeded, "the deadline passed")
            : Status(Code::kCancelled, "a stream of the request was cancelled or lost"));
}

void ChunkedTransfer::FailUpload(Status status, int64_t message_bytes) {
  {
    const MutexLock lock(mutex_);
    if (phase_ > Phase::kUploading) return;
    if (phase_ == Phase::kUploading) request_->message_bytes += message_bytes;
    FailLocked(std::move(status));
  }
  Settle();
}

void ChunkedTransfer::EndIfIdle(TimePoint now) {
  {
    const MutexLock lock(mutex_);
    const Duration timeout = context_.chunked.options().idle_timeout;
    if (phase_ != Phase::kUploading || in_hand_ > 0 || now - progress_ < timeout) return;
    FailLocked(Status(Code::kDeadlineExceeded,
                      "fewer than " + std::to_string(progress_step_bytes_) + " bytes arrived in " +
                          std::to_string(timeout / std::chrono::milliseconds(1)) +
                          " ms (chunked-idle-timeout); " +
                          std::to_string(places_.total_bytes() - placed_bytes_) + " of " +
                          std::to_string(places_.total_bytes()) + " bytes are missing"));
  }
  Settle();
}

void ChunkedTransfer::FailLocked(Status status) {
  if (phase_ != Phase::kEnded && failure_.ok()) failure_ = std::move(status);
}

void ChunkedTransfer::Settle() {
  std::unique_ptr<Request> leaving;
  AnswerChunks dropped;  // freed outside the lock
  bool cancel = false, ended = false;
  {
    const MutexLock lock(mutex_);
    // A copy may still be writing: the last Placed() comes here again.
    if (phase_ <= Phase::kUploading && in_hand_ == 0) {
      const bool complete = placed_bytes_ == places_.total_bytes();
      if (!complete && open_ == 0) FailLocked(MissingLocked());
      if (complete || !failure_.ok()) {
        phase_ = Phase::kRunning;
        request_->status = failure_;
        leaving = std::move(request_);
        self_ = shared_from_this();
      }
    } else if (phase_ == Phase::kRunning && !failure_.ok() && !cancelled()) {
      SetCancelled();  // before Submit's last check
      cancel = true;
    } else if (phase_ == Phase::kAnswering && !failure_.ok()) {
      phase_ = Phase::kEnded;
      std::swap(dropped, answer_);
      ended = true;
    }
  }
  if (cancel) context_.engine.Cancel(id_);  // if it is not queued yet, Submit sees the cancellation
  if (ended) AdvanceAll();
  if (leaving == nullptr) return;
  if (!leaving->status.ok()) return Finish(std::move(leaving));
  context_.reader.Submit(shared_from_this(), std::move(leaving));
}

StreamStep ChunkedTransfer::Next(bool first, bool granted) {
  const MutexLock lock(mutex_);
  StreamStep step;
  if (phase_ == Phase::kEnded) {
    return {.finish = true, .status = failure_, .refusal = refusal_};
  }
  if (phase_ == Phase::kAdmitting || !failure_.ok()) return step;
  if (!granted) {
    const ChunkedOptions& options = context_.chunked.options();
    step.write = EncodeGrant(first ? token_ : "", options.streams_max, options.chunk_bytes_max,
                             options.idle_timeout / std::chrono::milliseconds(1));
    return step;
  }
  if (phase_ != Phase::kAnswering) return step;
  if (first && std::exchange(header_due_, false)) {
    step.write = std::move(header_);
    return step;
  }
  if (!answer_.empty()) {
    step.chunk = true;
    step.write = answer_.Next(thresholds::kAnswerChunkBytes);
    ++writing_;
    return step;
  }
  // The first stream's status is the request's, so it finishes last.
  if (first && writing_ > 0) return step;
  if (first) phase_ = Phase::kEnded;
  step.finish = true;
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

void ChunkedTransfer::Finish(std::unique_ptr<Request> request) {
  TransferRef self;
  {
    const MutexLock lock(mutex_);
    self.swap(self_);
    if (failure_.ok()) failure_ = request->status;
    request->status = failure_;
  }
  const bool computed = request->status.ok();
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  // Before any stream may finish: call_, whose peer is recorded, belongs to the first one.
  span_ =
      RecordEnd(context_, *request, total_ns, computed ? AnswerBytes(*request) : 0, call_, facts_);
  OutMessage header;
  AnswerChunks answer;  // freed outside the lock, if it is no longer wanted
  if (computed) {
    v1::AttendResponse response;
    FillResponse(*request, total_ns, &response);
    response.set_kernel_reason(std::string(request->selection.why));
    header = EncodeChunkedHeader(&response);
    answer = AnswerChunks(OutputsOf(*request), std::move(request->output));
  }
  Refusal refusal = std::move(request->refusal);
  request.reset();  // frees its memory before the answer is sent or the client retries
  {
    const MutexLock lock(mutex_);
    refusal_ = std::move(refusal);
    assert(phase_ == Phase::kRunning);
    phase_ = failure_.ok() ? Phase::kAnswering : Phase::kEnded;
    if (failure_.ok()) {
      header_ = std::move(header);
      header_due_ = true;
      std::swap(answer_, answer);
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
