// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one call over AttendChunked, with its retries. The first stream sends the
// header; once that is granted, more streams join on other connections, and each stream takes the
// next piece of the tensors whenever it has sent one. A stream takes pieces only after its own
// grant. So a stream that never joins (it reached another server, or the request had ended) has
// sent no piece, and none is lost with it.
//
// A stream:   starting --1--> joining --2--> granted --3--> half-closed
//                                |              |                |
//                                +------4-------+-------4--------+--> finishing --5--> ended
// The call:   attempt --6--> waiting --7--> attempt
//             attempt --8--> one message (UnaryOp) --9--> ended
//             attempt, waiting --9--> ended
//
//   1  Sends the header or, on further streams, the token of the first stream's grant.
//   2  The grant has arrived: takes pieces. The first stream's grant starts the other streams.
//   3  No piece is left (the first stream stays open, or bytes would seem missing), or a write
//      failed.
//   4  Reading is over and gRPC holds no write: gRPC is asked for the status.
//   5  A failure cancels the other streams, unless this one never joined. Once the first has ended
//      and the answer is complete, streams that have not joined are cancelled.
//   6  All streams have ended, with a retryable failure.  7  The backoff is over.
//   8  All have ended with UNIMPLEMENTED before any grant, and the call fits one message.
//   9  With the answer, a final failure, or a cancellation.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/rpc/retrying_op.h"
#include "client/rpc/unary_op.h"
#include "client/wire/chunk_codec.h"
#include "kernels/util/mutex.h"

namespace attend::client {

class ChunkedOp final : public RetryingOp {
 public:
  // `call` is chunked. If the server answers UNIMPLEMENTED and there is an as_message(), that is
  // sent instead; if it succeeds, `*chunks_refused`, which must outlive the operation, becomes
  // true.
  ChunkedOp(ConnectionPool* pool, const EncodedCall& call, std::string_view id,
            const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
            std::atomic<bool>* chunks_refused, CallCallback callback);

  void Start();
  void OnEvent(int slot, bool ok) override;
  void Cancel() override;

 private:
  enum Kind { kStarted, kWritten, kRead, kFinished, kKinds };
  // A slot is stripe * kKinds + Kind.

  // One stream of an attempt.
  struct Stripe {
    int index = 0;
    Lease lease;
    int connection = 0;
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    std::array<Event, kKinds> events;
    grpc::ByteBuffer incoming;
    grpc::Status status;
    bool granted = false;      // joined the request: may send pieces
    bool writing = false;      // gRPC holds a write
    bool half_closed = false;  // or a write has failed
    bool read_over = false;
    bool finishing = false;
    bool ended = false;
  };

  // Holds the caller's memory; released without the lock.
  struct Remains {
    std::shared_ptr<const ChunkedCall> call;
    std::shared_ptr<const EncodedCall> as_message;
  };

  // The gRPC calls that an event leads to on its own stream. They run without the lock: gRPC writes
  // to the socket on the calling thread, which takes as long as a piece's bytes take, and the other
  // streams' threads would wait. That is safe because all of a stream's events arrive on this
  // thread, and a stream does not finish while a read or write is in flight.
  struct Ops {
    bool read = false;
    bool half_close = false;
    grpc::ByteBuffer message;  // written if valid
  };
  static void Perform(Stripe& stripe, const Ops& ops);

  // A stripe is used under mutex_, by these too; Perform is the exception.
  static void Write(Stripe& stripe, grpc::ByteBuffer message, Ops* ops);
  static void FinishIfOver(Stripe& stripe);
  void CancelAttempt() override;
  void StartAttempt() ATTEND_REQUIRES(mutex_);
  void StartStripe(const std::string& server) ATTEND_REQUIRES(mutex_);
  void StartMoreStripes() ATTEND_REQUIRES(mutex_);
  void WriteNext(Stripe& stripe, Ops* ops) ATTEND_REQUIRES(mutex_);
  void StripeEnded(Stripe& stripe) ATTEND_REQUIRES(mutex_);
  void NoteFailure(Status status, const Pushback& pushback) ATTEND_REQUIRES(mutex_);
  void CancelStripes() ATTEND_REQUIRES(mutex_);
  void CancelLatecomers() ATTEND_REQUIRES(mutex_);
  CallOutcome TakeOutcome(Status status, Remains* remains) ATTEND_REQUIRES(mutex_);
  Status UnjoinedFailure() const ATTEND_REQUIRES(mutex_);
  Status AttemptStatus() const ATTEND_REQUIRES(mutex_);
  // The same call as one message; null if `status` does not allow that, or after Cancel.
  std::shared_ptr<UnaryOp> MakeMessageOp(Status& status, Remains* remains) ATTEND_REQUIRES(mutex_);
  // Handles the result of reading one message, and the grant in it.
  void MessageTaken(Stripe& stripe, Status status, std::optional<v1::ChunkedGrant> grant, Ops* ops)
      ATTEND_REQUIRES(mutex_);

  void EndCall(CallOutcome outcome) ATTEND_EXCLUDES(mutex_);

  const RetryPolicy policy_;
  const uint64_t seed_;
  std::atomic<bool>* const chunks_refused_;
  std::shared_ptr<const ChunkedCall> call_ ATTEND_GUARDED_BY(mutex_);
  std::shared_ptr<const EncodedCall> as_message_ ATTEND_GUARDED_BY(mutex_);
  // Set while the call continues as one message.
  std::shared_ptr<UnaryOp> message_op_ ATTEND_GUARDED_BY(mutex_);

  // The current attempt's streams. Held by pointer, so that none moves while gRPC holds its events.
  std::vector<std::unique_ptr<Stripe>> stripes_ ATTEND_GUARDED_BY(mutex_);
  int64_t open_stripes_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::optional<v1::ChunkedGrant> grant_ ATTEND_GUARDED_BY(mutex_);  // the first stream's
  std::optional<ChunkedAnswer> answer_ ATTEND_GUARDED_BY(mutex_);
  ChunkedCall::Piece piece_ ATTEND_GUARDED_BY(mutex_);  // the last one taken by any stream
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Pushback pushback_ ATTEND_GUARDED_BY(mutex_);
  std::vector<int64_t> refused_lengths_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
