// SPDX-License-Identifier: Apache-2.0
//
// One AttendChunked request and the streams that carry it. It is admitted by its header, filled by
// chunks, run, and answered in chunks, each sent on any stream that is ready.
//
//   kAdmitting --1--> kUploading --2--> kRunning --3--> kAnswering
//        |                                ^   |              |
//        +---------------2----------------+   4              5
//                                             +-> kEnded <---+
//
// 1  Admit: the header is admitted.
// 2  Settle: all bytes are placed, and the request goes to the engine. Or it has failed, and
// neither
//    the header nor a chunk is in hand: then it ends without the engine.
// 3  Finish: it was computed, and nothing has failed.
// 4  Finish: it has failed.
// 5  Next: the header and all chunks are written, so the first stream may finish. Settle: the
//    request has failed.
//
// The first failure sets failure_ at once; the phase follows by one of the arrows. In kEnded every
// stream finishes with failure_, and the request's memory has been freed.
//
// Called by the streams on the transport's loops, and by the copy threads, the engine and the
// registry. A mutex guards the state; it is never held while a stream, the engine or the registry
// is called. Lock order: a stream's mutex before this one, because streams call in with theirs
// held.

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
  // The transfer's state has changed: do what is possible now. Any thread that holds a reference to
  // the stream.
  virtual void Advance() = 0;
};

// The next step of a stream; nothing if all are unset.
struct StreamStep {
  std::optional<OutMessage> write{};
  bool chunk = false;  // it is one: Written() must follow
  bool finish = false;
  Status status{};  // with `finish`
  Refusal refusal{};
};

// The destination of a chunk's bytes. Valid until Placed().
struct ChunkPlace {
  char* data = nullptr;        // null: the bytes are not wanted
  DeviceCopy* copy = nullptr;  // must be notified when they have arrived; null: none
};

class ChunkedTransfer final : public Call, public std::enable_shared_from_this<ChunkedTransfer> {
 public:
  // `first` is the stream that brought the header; `call` must live until that stream has finished.
  ChunkedTransfer(ServiceContext& context, const CallFacts& facts, const WireCall& call,
                  TimePoint deadline, std::shared_ptr<TransferStream> first);
  ~ChunkedTransfer() override;

  // The owning tenant.
  int tenant() const { return facts_.caller.tenant; }

  // Call once, not on a loop: admits the header or ends the request. `parsed`: whether the header
  // is valid.
  void Begin(const FirstMessage& first, Status parsed);

  // Adds a stream, if it may join. INVALID_ARGUMENT names the bound.
  Status Join(std::shared_ptr<TransferStream> stream);
  // Call before a stream is destroyed.
  void Leave(const TransferStream* stream);

  // Whether streams should continue reading.
  bool WantsBytes() {
    const MutexLock lock(mutex_);
    return phase_ == Phase::kUploading && failure_.ok();
  }
  // Reserves the chunk's place. If its bytes are wanted, Placed() must follow. INVALID_ARGUMENT if
  // the bytes may not go there: the caller then fails the upload.
  Status Reserve(const ChunkMessage& chunk, ChunkPlace* place);
  void Placed(int64_t bytes);
  // The client has half-closed one of the streams.
  void HalfClosed();

  // Ends the request with `status`, unless it has ended. Its memory is freed once the copies and
  // the batch that use it are done.
  void Fail(Status status);
  // A stream was cancelled or its connection lost.
  void FailCancelled();
  // Like Fail, but only while bytes are missing: for bad chunks, which are ignored later; for
  // draining, which ends no other requests; and for callers that lost their right. `message_bytes`:
  // size of the message that caused it.
  void FailUpload(Status status, int64_t message_bytes = 0);
  // Ends a stalled upload.
  void EndIfIdle(TimePoint now);
  // Whether a chunk that is still being written should be aborted: the request has failed, and the
  // chunk keeps its answer in memory.
  bool CutsOff() {
    const MutexLock lock(mutex_);
    return phase_ == Phase::kEnded;
  }

  // The stream's next write, or that it should finish. `granted`: its grant has been sent.
  StreamStep Next(bool first, bool granted);
  // A result chunk has been written, or could not be.
  void Written(bool ok);

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return call_.Peer(); }

 private:
  enum class Phase { kAdmitting, kUploading, kRunning, kAnswering, kEnded };

  // `request` is request_, which stays in place while the header is in hand.
  Status Admit(const RequestMessage& header, Request& request);
  // The first failure counts.
  void FailLocked(Status status) ATTEND_REQUIRES(mutex_);
  // Does what follows from a change of the state.
  void Settle() ATTEND_EXCLUDES(mutex_);
  Status MissingLocked() const ATTEND_REQUIRES(mutex_);
  void AdvanceAll();

  ServiceContext& context_;
  const CallFacts facts_;
  const WireCall& call_;
  const TimePoint deadline_;
  uint64_t id_ = 0;  // set once, in the constructor

  Mutex mutex_;
  Phase phase_ ATTEND_GUARDED_BY(mutex_) = Phase::kAdmitting;
  // Why the request ends; OK while nothing has failed.
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Refusal refusal_ ATTEND_GUARDED_BY(mutex_);  // with failure_
  std::vector<std::shared_ptr<TransferStream>> streams_ ATTEND_GUARDED_BY(mutex_);
  int64_t joined_ ATTEND_GUARDED_BY(mutex_) = 1;  // streams that have joined so far
  int64_t open_ ATTEND_GUARDED_BY(mutex_) = 1;    // streams on which the client may still send
  std::string token_ ATTEND_GUARDED_BY(mutex_);   // empty until admitted

  std::unique_ptr<Request> request_ ATTEND_GUARDED_BY(mutex_);  // until kRunning
  UploadPlaces places_ ATTEND_GUARDED_BY(mutex_);
  int64_t placed_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Chunks being copied; initially the header.
  int64_t in_hand_ ATTEND_GUARDED_BY(mutex_) = 1;
  // When the last progress_step_bytes_ were complete.
  TimePoint progress_ ATTEND_GUARDED_BY(mutex_);
  int64_t progress_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Bytes that must arrive per idle timeout.
  int64_t progress_step_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;

  // The request may have been queued in the engine.
  bool queued_ ATTEND_GUARDED_BY(mutex_) = false;

  OutMessage header_ ATTEND_GUARDED_BY(mutex_);  // of the answer, until written
  bool header_due_ ATTEND_GUARDED_BY(mutex_) = false;
  AnswerChunks answer_ ATTEND_GUARDED_BY(mutex_);  // until all of it has been handed to streams
  int64_t writing_ ATTEND_GUARDED_BY(mutex_) = 0;  // chunks being written
  std::unique_ptr<OpenSpan> span_;                 // ends with the last stream
  std::shared_ptr<ChunkedTransfer> self_;          // from kRunning to Finish
};

using TransferRef = std::shared_ptr<ChunkedTransfer>;

}  // namespace attend
