// SPDX-License-Identifier: Apache-2.0

#include "server/chunked_transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/chunked_stream.h"
#include "server/reply.h"

namespace attend {
namespace {

// A client shows that it goes on by this many bytes per idle timeout, not by single ones; and by
// this part of all its bytes, so that it holds memory for at most so many timeouts.
constexpr int64_t kProgressBytesMin = int64_t{64} << 10;
constexpr int64_t kProgressParts = 16;
// Disjoint ranges are memory outside the budget: one for each of so many bytes, within bounds.
constexpr int64_t kRangeBytes = 1024;
constexpr int64_t kRangesLeast = 64;
constexpr int64_t kRangesMost = 16384;

constexpr std::array<const char*, kTensorsMax> kTensorNames = {"q", "k", "v", "bias"};

std::string ChunkText(int tensor, const ChunkMessage& chunk) {
  return "chunk of " + std::string(kTensorNames[tensor]) + ", offset " +
         std::to_string(chunk.offset()) + ", " + std::to_string(chunk.bytes()) + " bytes, ";
}

int64_t Milliseconds(Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

}  // namespace

ChunkedTransfer::ChunkedTransfer(ServiceContext& context, const grpc::CallbackServerContext& call,
                                 TimePoint deadline, std::shared_ptr<ChunkedStream> first)
    : context_(context), call_(call), deadline_(deadline), first_(first.get()) {
  streams_.push_back(std::move(first));
  request_ = NewRequest(context_, *this, deadline);
  request_->transport = Transport::kChunked;
  request_->tenant = TenantOf(context_, call_);
  id_ = request_->id;
}

ChunkedTransfer::~ChunkedTransfer() {
  if (queued_) context_.admitted_calls.fetch_sub(1, std::memory_order_release);
}

void ChunkedTransfer::Begin(const v1::AttendRequest& header, int64_t message_bytes, Status parsed) {
  const TransferRef self(this);
  request_->message_bytes = message_bytes;  // nobody else looks at it while the header is in hand
  if (!parsed.ok()) {
    FailUpload(Rejection::kInvalid, std::move(parsed));
  } else if (Status status = Admit(header); !status.ok()) {
    Fail(std::move(status));
  }
  Placed(0);
  PokeAll();
}

Status ChunkedTransfer::Admit(const v1::AttendRequest& header) {
  {
    // Memory for a request that was cancelled while it waited for this thread would be for nothing.
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  if (deadline_ != kNever && deadline_ <= context_.clock.Now()) {
    return context_.intake.Reject(
        Rejection::kDeadlinePassed,
        Status(Code::kDeadlineExceeded, "the deadline had passed on arrival"));
  }
  TensorPlaces places;
  ATTEND_RETURN_IF_ERROR(context_.intake.AcceptHeader(header, *request_, places));
  Result<std::string> token = context_.chunked.Add(*this);
  if (!token.ok()) return token.status();
  const std::lock_guard lock(mutex_);
  token_ = std::move(*token);
  places_ = places;
  for (int i = 0; i < places_.tensors; ++i) total_bytes_ += places_.bytes[i];
  progress_step_bytes_ = std::max(kProgressBytesMin, total_bytes_ / kProgressParts);
  progress_ = context_.clock.Now();
  phase_ = Phase::kUploading;
  return Status();
}

Status ChunkedTransfer::Join(std::shared_ptr<ChunkedStream> stream) {
  const std::lock_guard lock(mutex_);
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

void ChunkedTransfer::Leave(const ChunkedStream* stream) {
  std::string token;
  std::shared_ptr<ChunkedStream> gone;  // let go of outside the lock
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(streams_.begin(), streams_.end(),
                                    [&](const auto& each) { return each.get() == stream; });
    if (found != streams_.end()) {
      gone = std::move(*found);
      streams_.erase(found);
    }
    if (stream == first_) token = token_;
  }
  if (!token.empty()) context_.chunked.Remove(token);
}

bool ChunkedTransfer::WantsBytes() {
  const std::lock_guard lock(mutex_);
  return phase_ == Phase::kUploading && failure_.ok();
}

Status ChunkedTransfer::Reserve(const ChunkMessage& chunk, ChunkPlace* place) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kUploading || !failure_.ok()) return Status();
  // Any 32 bits may come: compared before they are computed with.
  if (chunk.tensor() < v1::TENSOR_NAME_Q || chunk.tensor() >= v1::TENSOR_NAME_Q + places_.tensors) {
    return InvalidArgument("a chunk's tensor is " + std::to_string(chunk.tensor()) +
                           ", must be Q (1), K (2)" +
                           (places_.tensors == 4 ? ", V (3) or BIAS (4)" : " or V (3)"));
  }
  const int tensor = chunk.tensor() - v1::TENSOR_NAME_Q;
  const int64_t size = places_.bytes[tensor];
  if (chunk.bytes() > size || chunk.offset() > static_cast<uint64_t>(size - chunk.bytes())) {
    return InvalidArgument(ChunkText(tensor, chunk) + "ends behind the tensor's " +
                           std::to_string(size) + " bytes");
  }
  const int64_t begin = static_cast<int64_t>(chunk.offset());
  if (const auto overlap = ranges_[tensor].Add({begin, begin + chunk.bytes()})) {
    return InvalidArgument(ChunkText(tensor, chunk) + "overlaps bytes that came before: [" +
                           std::to_string(overlap->begin) + ", " + std::to_string(overlap->end) +
                           ")");
  }
  int64_t ranges = 0;
  for (const ByteRanges& each : ranges_) ranges += each.count();
  const int64_t ranges_max = std::clamp(total_bytes_ / kRangeBytes, kRangesLeast, kRangesMost);
  if (ranges > ranges_max) {
    return InvalidArgument(ChunkText(tensor, chunk) + "makes more than " +
                           std::to_string(ranges_max) + " separate pieces of the tensors");
  }
  request_->message_bytes += chunk.message_bytes();
  ++in_hand_;
  *place = {places_.data[tensor] + begin, request_->staged.get()};
  return Status();
}

void ChunkedTransfer::Placed(int64_t bytes) {
  Lock lock(mutex_);
  --in_hand_;
  placed_bytes_ += bytes;
  if (placed_bytes_ - progress_bytes_ >= progress_step_bytes_) {
    progress_bytes_ = placed_bytes_;
    progress_ = context_.clock.Now();
  }
  const bool failed = !failure_.ok();
  if (phase_ == Phase::kUploading && !failed && placed_bytes_ == total_bytes_) {
    Run(lock);
  } else if (in_hand_ == 0 && phase_ <= Phase::kUploading && failed) {
    EndUpload(lock);
  } else if (in_hand_ == 0 && phase_ == Phase::kUploading && open_ == 0) {
    FailUploadLocked(lock, Rejection::kInvalid, MissingLocked());
  }
}

void ChunkedTransfer::Run(Lock& lock) {
  phase_ = Phase::kRunning;
  std::unique_ptr<Request> request = std::move(request_);
  lock.unlock();
  const TransferRef self(this);
  Ref();  // until Finish
  context_.intake.Submit(*this, std::move(request));
}

void ChunkedTransfer::HalfClosed() {
  Lock lock(mutex_);
  --open_;
  if (open_ == 0 && in_hand_ == 0 && phase_ == Phase::kUploading && failure_.ok()) {
    FailUploadLocked(lock, Rejection::kInvalid, MissingLocked());
  }
}

Status ChunkedTransfer::MissingLocked() const {
  std::string text;
  for (int i = 0; i < places_.tensors; ++i) {
    const int64_t missing = places_.bytes[i] - ranges_[i].bytes();
    if (missing == 0) continue;
    text += (text.empty() ? "" : ", ") + std::to_string(missing) + " of " + kTensorNames[i] +
            "'s " + std::to_string(places_.bytes[i]) + " bytes";
  }
  return InvalidArgument("all streams are half-closed and missing are " + text);
}

void ChunkedTransfer::Fail(Status status) {
  Lock lock(mutex_);
  FailLocked(lock, std::move(status));
}

void ChunkedTransfer::FailCancelled() {
  const bool late = deadline_ != kNever && deadline_ <= context_.clock.Now();
  Fail(late ? Status(Code::kDeadlineExceeded, "the deadline passed")
            : Status(Code::kCancelled, "a stream of the request was cancelled or lost"));
}

void ChunkedTransfer::FailUpload(Rejection reason, Status status) {
  Lock lock(mutex_);
  FailUploadLocked(lock, reason, std::move(status));
}

void ChunkedTransfer::FailUploadLocked(Lock& lock, Rejection reason, Status status) {
  if (phase_ > Phase::kUploading || !failure_.ok()) {
    lock.unlock();
    return;
  }
  FailLocked(lock, context_.intake.Reject(reason, std::move(status)));
}

void ChunkedTransfer::EndIfIdle(TimePoint now) {
  Lock lock(mutex_);
  const Duration timeout = context_.chunked.options().idle_timeout;
  if (phase_ != Phase::kUploading || in_hand_ > 0 || now - progress_ < timeout) return;
  FailLocked(lock,
             Status(Code::kDeadlineExceeded,
                    "fewer than " + std::to_string(progress_step_bytes_) + " bytes came in " +
                        std::to_string(Milliseconds(timeout)) + " ms (chunked-idle-timeout), " +
                        std::to_string(total_bytes_ - placed_bytes_) + " of " +
                        std::to_string(total_bytes_) + " are missing"));
}

bool ChunkedTransfer::ended() {
  const std::lock_guard lock(mutex_);
  return phase_ == Phase::kEnded;
}

void ChunkedTransfer::FailLocked(Lock& lock, Status status) {
  if (phase_ >= Phase::kEnding || !failure_.ok()) {
    lock.unlock();
    return;
  }
  failure_ = std::move(status);
  const bool queued = queued_;
  switch (phase_) {
    case Phase::kAdmitting:
    case Phase::kUploading:
      if (in_hand_ == 0) return EndUpload(lock);
      lock.unlock();  // the last Placed() does
      return;
    case Phase::kRunning:
      SetCancelled();  // before Submit can look for the last time
      lock.unlock();
      if (queued) context_.engine.Cancel(id_);  // else Submit sees it
      return;
    default: {
      phase_ = Phase::kEnded;
      const std::shared_ptr<const HostBlock> output = std::move(output_);
      lock.unlock();
      PokeAll();
    }
  }
}

void ChunkedTransfer::EndUpload(Lock& lock) {
  phase_ = Phase::kEnding;
  std::unique_ptr<Request> request = std::move(request_);
  request->status = failure_;
  lock.unlock();
  const TransferRef self(this);
  // Before any stream may finish: the record names the first one's peer.
  RecordEnd(context_, *request, NanosecondsBetween(request->received, context_.clock.Now()), 0,
            call_);
  request.reset();  // its memory before the client hears of it and tries again
  lock.lock();
  phase_ = Phase::kEnded;
  lock.unlock();
  PokeAll();
}

StreamStep ChunkedTransfer::Next(bool first, bool greeted) {
  const std::lock_guard lock(mutex_);
  StreamStep step;
  if (phase_ == Phase::kEnded) {
    step.kind = StreamStep::Kind::kFinish;
    step.status = failure_;
    return step;
  }
  if (phase_ == Phase::kAdmitting || phase_ == Phase::kEnding) return step;
  if (!greeted) {
    step.kind = StreamStep::Kind::kWrite;
    const ChunkedOptions& options = context_.chunked.options();
    step.message = EncodeGrant(first ? token_ : "", options.streams_max, options.chunk_bytes_max,
                               Milliseconds(options.idle_timeout));
    return step;
  }
  if (phase_ != Phase::kAnswering) return step;
  if (first && std::exchange(header_due_, false)) {
    step.kind = StreamStep::Kind::kWrite;
    step.message.Swap(&header_);
    return step;
  }
  step = NextChunkLocked();
  if (step.kind != StreamStep::Kind::kNone) return step;
  // The first stream's status speaks for all, so it comes last.
  if (first && writing_ > 0) return step;
  if (first) phase_ = Phase::kEnded;
  step.kind = StreamStep::Kind::kFinish;
  return step;
}

StreamStep ChunkedTransfer::NextChunkLocked() {
  StreamStep step;
  for (Part& part : parts_) {
    if (part.next == part.bytes) continue;
    const int64_t bytes = std::min(kAnswerChunkBytes, part.bytes - part.next);
    step.kind = StreamStep::Kind::kWrite;
    step.chunk = true;
    step.message = EncodeChunk(part.name, part.next, part.data + part.next, bytes, output_);
    part.next += bytes;
    ++writing_;
    return step;
  }
  output_.reset();  // gRPC holds what it has not sent
  return step;
}

void ChunkedTransfer::Written(bool ok) {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    last = --writing_ == 0 && phase_ == Phase::kAnswering;
  }
  if (!ok) return FailCancelled();
  if (last) PokeAll();
}

void ChunkedTransfer::OnAdmitted(uint64_t) {
  context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  queued_ = true;
}

void ChunkedTransfer::Finish(std::unique_ptr<Request> request) {
  const TransferRef self = TransferRef::Adopt(this);  // Run's
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) request->status = failure_;
  }
  const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
  const Status status = request->status;
  const int64_t o_bytes = status.ok() ? BytesO(request->attention.problem) : 0;
  const int64_t lse_bytes = status.ok() ? BytesLse(request->attention.problem) : 0;
  RecordEnd(context_, *request, total_ns, o_bytes + lse_bytes, call_);
  grpc::ByteBuffer header;
  std::array<Part, 2> parts;
  std::shared_ptr<const HostBlock> output;
  if (status.ok()) {
    v1::AttendResponse response;
    FillResponse(*request, total_ns, &response);
    header = EncodeChunkedHeader(&response);
    const auto* const o = static_cast<const char*>(request->attention.o.data);
    const auto* const lse = reinterpret_cast<const char*>(request->attention.lse);
    parts = {Part{v1::TENSOR_NAME_O, o, o_bytes, 0}, Part{v1::TENSOR_NAME_LSE, lse, lse_bytes, 0}};
    output = std::make_shared<HostBlock>(std::move(request->output));
  }
  request.reset();  // the input block goes back before the answer leaves
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = status;
    phase_ = failure_.ok() ? Phase::kAnswering : Phase::kEnded;
    if (failure_.ok()) {
      header_.Swap(&header);
      header_due_ = true;
      parts_ = parts;
      output_ = std::move(output);
    }
  }
  output.reset();  // of an answer that nobody wants, before anyone hears that it has ended
  PokeAll();
}

void ChunkedTransfer::PokeAll() {
  std::vector<std::shared_ptr<ChunkedStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const std::shared_ptr<ChunkedStream>& stream : streams) stream->Poke();
}

}  // namespace attend
