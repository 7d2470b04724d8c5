// SPDX-License-Identifier: Apache-2.0
//
// One request of AttendChunked and the streams that carry it. It is admitted by its header, filled
// by chunks, run, and answered in chunks, each of which goes to whichever stream is ready.
//
//   kAdmitting --1--> kUploading --2--> kRunning --3--> kAnswering
//        |                                ^   |              |
//        +---------------2----------------+   4              5
//                                             +-> kEnded <---+
//
//   1  Admit: the header is admitted.
//   2  LeaveLocked: all bytes are placed, and the engine gets the request. Or it has failed, and
//      neither the header nor a chunk is in hand: then it ends without the engine.
//   3  Finish: it was computed, and nothing has failed.
//   4  Finish: it has failed.
//   5  Next: the header and all chunks are written, so the first stream may finish. FailLocked: or
//      the request has failed.
//
// The first failure sets failure_ at once; the phase follows by an arrow above. In kEnded every
// stream finishes with failure_, and the request's memory is free again.
//
// The streams live on gRPC's threads and call in; the copy threads, the engine and the registry
// call in from theirs. A mutex guards the state. It is never held while a stream, the engine or the
// registry is called. Streams call in with their own mutex held, so theirs is locked first.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/rpc/call.h"
#include "server/rpc/call_context.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/upload_places.h"
#include "server/wire/answer_chunks.h"
#include "server/wire/chunk_codec.h"

namespace attend {

// A stream that carries a transfer.
class TransferStream {
 public:
  virtual ~TransferStream() = default;
  // Something has changed: does what there is to do now. Any thread that holds a reference to the
  // stream.
  virtual void Advance() = 0;
};

// The next step of a stream.
struct StreamStep {
  enum class Kind { kNone, kWrite, kFinish };
  Kind kind = Kind::kNone;
  OutMessage message{};  // kWrite
  bool chunk = false;    // kWrite: Written() must follow
  Status status{};       // kFinish
  Refusal refusal{};     // with it
};

// Where a chunk's bytes go. Valid until Placed().
struct ChunkPlace {
  char* data = nullptr;        // null: the bytes are not wanted
  DeviceCopy* copy = nullptr;  // to be told once they are there; null: there is none
};

class ChunkedTransfer final : public Call {
 public:
  // `first` is the stream that brought the header; `call` lives until that stream is finished.
  ChunkedTransfer(ServiceContext& context, const CallFacts& facts, const WireCall& call,
                  TimePoint deadline, std::shared_ptr<TransferStream> first);

  // Whose it is.
  int tenant() const { return facts_.caller.tenant; }

  // Call once, not on a loop: admits the header, or ends the request. `parsed` says whether
  // there is a header.
  void Begin(const FirstMessage& first, Status parsed);

  // Adds a stream, if it may join. INVALID_ARGUMENT names the bound.
  Status Join(std::shared_ptr<TransferStream> stream);
  // A stream is about to be destroyed.
  void Leave(const TransferStream* stream);

  // Whether streams should go on reading.
  bool WantsBytes() {
    const MutexLock lock(mutex_);
    return phase_ == Phase::kUploading && failure_.ok();
  }
  // Reserves the chunk's place. If its bytes are wanted, Placed() must follow. INVALID_ARGUMENT if
  // no byte may go there: the caller then fails the upload.
  Status Reserve(const ChunkMessage& chunk, ChunkPlace* place);
  void Placed(int64_t bytes);
  // The client sends nothing more on one of the streams.
  void HalfClosed();

  // Ends the request with `status`, unless it has ended. Its memory is freed once the copies and
  // the batch that use it are done.
  void Fail(Status status);
  // A stream was cancelled, or its connection lost.
  void FailCancelled();
  // The same, but only if bytes are missing. For bad chunks, which are ignored after that, for
  // draining, which ends no other requests, and for callers that have lost their right.
  // `message_bytes`: of the message that is why.
  void FailUpload(Status status, int64_t message_bytes = 0);
  // Ends a stalled upload.
  void EndIfIdle(TimePoint now);
  // Whether to cut off a chunk that is still being written: a stream was cancelled or lost, and the
  // chunk keeps the request's answer in memory.
  bool CutsOff() {
    const MutexLock lock(mutex_);
    return phase_ == Phase::kEnded;
  }

  // The next write of the stream, or that it should finish. `granted`: it has been sent its
  // grant. `call` is the stream's.
  StreamStep Next(bool first, bool granted, const WatchedRef& call);
  // A result chunk was written, or failed to be.
  void Written(bool ok);

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return call_.Peer(); }

 private:
  enum class Phase { kAdmitting, kUploading, kRunning, kAnswering, kEnded };

  // The consequence of a change of the state: Do() does it, without the lock.
  struct Rest {
    enum Kind { kNone, kLeave, kCancel, kAdvance };
    Kind kind = kNone;
    std::unique_ptr<Request> request{};  // kLeave: goes to the engine, or ends if it has failed
    AnswerChunks dropped{};              // kAdvance: freed with this
  };

  ~ChunkedTransfer() override;
  // `request` is request_, which stays while the header is in hand.
  Status Admit(const RequestMessage& header, Request& request);
  Rest FailLocked(Status status) ATTEND_REQUIRES(mutex_);
  Rest FailUploadLocked(Status status) ATTEND_REQUIRES(mutex_);
  Rest LeaveLocked() ATTEND_REQUIRES(mutex_);
  void Do(Rest rest) ATTEND_EXCLUDES(mutex_);
  Status MissingLocked() const ATTEND_REQUIRES(mutex_);
  void AdvanceAll();

  ServiceContext& context_;
  const CallFacts facts_;
  const WireCall& call_;
  const TimePoint deadline_;
  uint64_t id_ = 0;  // set once, when the transfer is made

  Mutex mutex_;
  Phase phase_ ATTEND_GUARDED_BY(mutex_) = Phase::kAdmitting;
  // Why the request ends; OK while nothing has failed.
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Refusal refusal_ ATTEND_GUARDED_BY(mutex_);  // with it
  std::vector<std::shared_ptr<TransferStream>> streams_ ATTEND_GUARDED_BY(mutex_);
  int64_t joined_ ATTEND_GUARDED_BY(mutex_) = 1;  // streams that ever joined
  int64_t open_ ATTEND_GUARDED_BY(mutex_) = 1;    // streams on which the client may still send
  std::string token_ ATTEND_GUARDED_BY(mutex_);   // empty until admitted

  std::unique_ptr<Request> request_ ATTEND_GUARDED_BY(mutex_);  // until kRunning
  UploadPlaces places_ ATTEND_GUARDED_BY(mutex_);
  int64_t placed_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Chunks being copied; at first, the header.
  int64_t in_hand_ ATTEND_GUARDED_BY(mutex_) = 1;
  // When the last progress_step_bytes_ were complete.
  TimePoint progress_ ATTEND_GUARDED_BY(mutex_);
  int64_t progress_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Bytes that must arrive in one idle timeout.
  int64_t progress_step_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;

  // The engine may have, or has had, the request.
  bool queued_ ATTEND_GUARDED_BY(mutex_) = false;

  OutMessage header_ ATTEND_GUARDED_BY(mutex_);  // of the answer, until written
  bool header_due_ ATTEND_GUARDED_BY(mutex_) = false;
  AnswerChunks answer_ ATTEND_GUARDED_BY(mutex_);  // until all of it is handed to streams
  int64_t writing_ ATTEND_GUARDED_BY(mutex_) = 0;  // chunks being written
  std::unique_ptr<OpenSpan> span_;                 // ends with the last stream
};

using TransferRef = CallRef<ChunkedTransfer>;

}  // namespace attend
