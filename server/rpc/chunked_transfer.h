// SPDX-License-Identifier: Apache-2.0
//
// One request of AttendChunked and the streams that carry it: admitted by its header, filled by
// chunks, run, and answered in chunks that whichever stream is ready takes. Where parts of it are
// computed while the rest arrives (upload_run.h), their answers leave by all streams but the first,
// on which the answer's header comes before them.
//
// The streams live on gRPC's threads and call in; the copy pool, the engine and the registry call
// in from theirs. A mutex guards the state. It is never held while a stream, the engine or the
// registry is called; streams do call in with their own mutex held, so that one comes first.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/rpc/call.h"
#include "server/rpc/call_context.h"
#include "server/rpc/intake.h"
#include "server/rpc/upload_places.h"
#include "server/upload/upload_run.h"
#include "server/wire/answer_chunks.h"
#include "server/wire/chunk_codec.h"

namespace attend {

// A stream that carries one.
class TransferStream {
 public:
  virtual ~TransferStream() = default;
  // Does what there is to do, as something has changed. Any thread that holds the stream.
  virtual void Poke() = 0;
};

// What a stream should do next.
struct StreamStep {
  enum class Kind { kNone, kWrite, kFinish };
  Kind kind = Kind::kNone;
  grpc::ByteBuffer message;  // kWrite
  bool chunk = false;        // kWrite: Written() must follow
  Status status;             // kFinish
};

// Where a chunk's bytes go, until Placed(): a chunk without bytes may find the rest gone.
struct ChunkPlace {
  char* data = nullptr;          // null: nobody wants them
  DeviceCopy* staged = nullptr;  // null: they go nowhere else
  UploadRun* run = nullptr;      // with it: what they may let begin; null: nothing
};

class ChunkedTransfer final : public Call {
 public:
  // `first` is the stream that brought the header; `call` lives as long as that is not finished.
  ChunkedTransfer(ServiceContext& context, const grpc::CallbackServerContext& call,
                  TimePoint deadline, std::shared_ptr<TransferStream> first);

  // Once, not on gRPC's threads: admits the header, or ends the request. `parsed` says whether
  // there is one.
  void Begin(const FirstMessage& first, Status parsed);

  // One more stream, if it may join. INVALID_ARGUMENT names the bound.
  Status Join(std::shared_ptr<TransferStream> stream);
  // A stream is about to be gone.
  void Leave(const TransferStream* stream);

  // Whether streams should read on.
  bool WantsBytes() {
    const std::lock_guard lock(mutex_);
    return phase_ == Phase::kUploading && failure_.ok();
  }
  // Where the chunk's bytes go; if they are wanted, Placed() must follow.
  // INVALID_ARGUMENT if no byte may go there: the caller fails the upload.
  Status Reserve(const ChunkMessage& chunk, ChunkPlace* place);
  void Placed(int64_t bytes);
  // A stream sends no more.
  void HalfClosed();

  // Ends the request with `status`, unless it has ended; nothing of it is left once the copies and
  // the batch that hold its memory are done.
  void Fail(Status status);
  // A stream was cancelled, or its connection lost.
  void FailCancelled();
  // The same if its bytes are not complete, which counts as a rejection: of bad chunks, which are
  // not looked at later, and by draining, which ends nothing else.
  void FailUpload(Rejection reason, Status status);
  // Ends an upload that stands still, and what is left of a request that has ended.
  void EndIfIdle(TimePoint now);
  // Whether a chunk that is being written is to be cut off: nobody reads it, and it would keep the
  // answer of a request that has ended. So it is taken to be once a stream was cancelled or lost,
  // and an idle timeout after the end.
  bool CutsOff() {
    const std::lock_guard lock(mutex_);
    return phase_ == Phase::kEnded && unread_;
  }

  // What the stream should write, `greeted` if it has had its grant; or that it should finish.
  // `call` is the stream's.
  StreamStep Next(bool first, bool greeted, const WatchedRef& call);
  // A result chunk left, or did not.
  void Written(bool ok);

  // Call
  void OnAdmitted(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return call_.peer(); }

 private:
  enum class Phase { kAdmitting, kUploading, kRunning, kAnswering, kEnding, kEnded };
  using Lock = std::unique_lock<std::mutex>;

  ~ChunkedTransfer() override;
  Status Admit(const RequestMessage& header);
  // These four are entered with the lock and leave without.
  void FailLocked(Lock& lock, Status status);
  void FailUploadLocked(Lock& lock, Rejection reason, Status status);
  void EndUpload(Lock& lock);
  void Run(Lock& lock);
  Status MissingLocked() const;
  StreamStep NextChunkLocked(const WatchedRef& call);
  // A part of the request has ended before the whole.
  void TakePart(const Request& part);
  // Goes on once no part of the request runs, maybe before it returns: its memory may go then.
  using Then = void (ChunkedTransfer::*)(std::unique_ptr<Request> request);
  void WhenQuiet(std::unique_ptr<Request> request, Then then);
  void UploadEnded(std::unique_ptr<Request> request);
  void DropAnswer();
  void Ended(std::unique_ptr<Request> request);
  void PokeAll();

  ServiceContext& context_;
  const grpc::CallbackServerContext& call_;
  const TimePoint deadline_;

  std::mutex mutex_;
  Phase phase_ = Phase::kAdmitting;
  Status failure_;  // why it ends; OK while all is well
  std::vector<std::shared_ptr<TransferStream>> streams_;
  const TransferStream* const first_;
  int64_t joined_ = 1;  // streams, gone ones too
  int64_t open_ = 1;    // streams that may still send
  std::string token_;   // empty until admitted

  std::unique_ptr<Request> request_;  // until it is submitted
  std::shared_ptr<UploadRun> run_;    // the request's; set once, before its first byte
  UploadPlaces places_;
  int64_t placed_bytes_ = 0;
  int64_t in_hand_ = 1;  // chunks that are being copied; at first, the header
  TimePoint progress_;   // when the last progress_step_bytes_ were complete, or the request ended
  int64_t progress_bytes_ = 0;
  int64_t progress_step_bytes_ = 0;  // what must come in one idle timeout

  uint64_t id_ = 0;
  bool queued_ = false;  // may be, or has been
  bool unread_ = false;  // see CutsOff

  grpc::ByteBuffer header_;  // of the answer, until written
  bool header_due_ = false;
  AnswerChunks answer_;  // until all is given to streams
  int64_t writing_ = 0;  // chunks
};

using TransferRef = CallRef<ChunkedTransfer>;

}  // namespace attend
