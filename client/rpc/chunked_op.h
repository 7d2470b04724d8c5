// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one call over AttendChunked, with its retries. The first stream brings
// the header; once that is admitted, more streams join on other connections, and each stream takes
// the next piece of the tensors when it has sent one. A stream takes pieces only once the server
// has granted it, so one that never joins (it met another server, or the request's end) brings
// nothing and takes nothing with it.
//
// A stream:   starting --1--> joining --2--> granted --3--> half-closed
//                                |              |                |
//                                +------4-------+-------4--------+--> finishing --5--> ended
// The call:   attempt --6--> waiting --7--> attempt
//             attempt --8--> one message (UnaryOp) --9--> ended
//             attempt, waiting --9--> ended
//
//   1  It sends the header or, if it is not the first, the token of the first one's grant.
//   2  Its grant has come: it takes pieces. The first one's grant starts the other streams.
//   3  No piece is left (the first stays open, or bytes would seem missing), or a write failed.
//   4  Reading is over, and no write is with gRPC, which is asked for the status.
//   5  A failure cancels the other streams, unless this one never joined. Once the first has ended
//      and the answer is complete, those that have not joined are cancelled.
//   6  All streams have ended, with a failure that may be tried again.  7  The wait is over.
//   8  All have ended with UNIMPLEMENTED before any grant, and the call fits one message.
//   9  With the answer, a failure that is final, or a cancellation.

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
  // `call` is chunked. If it is UNIMPLEMENTED and has as_message(), that is sent; if that is
  // answered, `*chunks_refused`, which outlives the operation, becomes true.
  ChunkedOp(ConnectionPool* pool, const EncodedCall& call, std::string_view id,
            const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
            std::atomic<bool>* chunks_refused, CallCallback callback);

  void Start();
  void OnEvent(int slot, bool ok) override;
  void Cancel() override;

 private:
  enum Kind { kStarted, kWritten, kRead, kFinished, kKinds };
  // Slots are stripe * kKinds + Kind.

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
    bool granted = false;      // part of the request: may send pieces
    bool writing = false;      // gRPC does
    bool half_closed = false;  // or cannot be written to any more
    bool read_over = false;
    bool finishing = false;
    bool ended = false;
  };

  // Holds the caller's memory, and is let go of without the lock.
  struct Remains {
    std::shared_ptr<const ChunkedCall> call;
    std::shared_ptr<const EncodedCall> as_message;
  };

  // The calls that an event leads to on its own stream. Done without the lock: gRPC writes to the
  // socket on the calling thread, which takes as long as a piece's bytes do, and the other streams'
  // threads would wait for it. Nothing else happens to the stream meanwhile: its events all come to
  // this thread, and it does not finish while it reads or writes.
  struct Ops {
    bool read = false;
    bool half_close = false;
    grpc::ByteBuffer message;  // to write, if valid
  };
  static void Perform(Stripe& stripe, const Ops& ops);

  // A stripe is used with mutex_ held, by these too, except by Perform.
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
  // The same call as one message, or null if that is no way out of `status`, or was cancelled.
  std::shared_ptr<UnaryOp> MakeMessageOp(Status& status, Remains* remains) ATTEND_REQUIRES(mutex_);
  // A message was taken: how that went, and the grant in it.
  void MessageTaken(Stripe& stripe, Status status, std::optional<v1::ChunkedGrant> grant, Ops* ops)
      ATTEND_REQUIRES(mutex_);

  void EndCall(CallOutcome outcome) ATTEND_EXCLUDES(mutex_);

  const RetryPolicy policy_;
  const uint64_t seed_;
  std::atomic<bool>* const chunks_refused_;
  std::shared_ptr<const ChunkedCall> call_ ATTEND_GUARDED_BY(mutex_);
  std::shared_ptr<const EncodedCall> as_message_ ATTEND_GUARDED_BY(mutex_);
  // Once the call goes on as one message.
  std::shared_ptr<UnaryOp> message_op_ ATTEND_GUARDED_BY(mutex_);

  // The present attempt's. Reserved, so that none moves while events are out.
  std::vector<std::unique_ptr<Stripe>> stripes_ ATTEND_GUARDED_BY(mutex_);
  int64_t open_stripes_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::optional<v1::ChunkedGrant> grant_ ATTEND_GUARDED_BY(mutex_);  // the first stream's
  std::optional<ChunkedAnswer> answer_ ATTEND_GUARDED_BY(mutex_);
  ChunkedCall::Piece piece_ ATTEND_GUARDED_BY(mutex_);  // the last one that a stream has taken
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Pushback pushback_ ATTEND_GUARDED_BY(mutex_);
  std::vector<int64_t> refused_lengths_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
