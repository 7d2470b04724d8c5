// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one call over AttendChunked, with its retries. The first stream brings
// the header; once that is admitted, more streams join on other connections, and each stream takes
// the next piece of the tensors when it has sent one. A stream takes pieces only once the server
// has granted it, so one that never joins (it met another server, or the request's end) brings
// nothing and takes nothing with it.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "client/rpc/retrying_op.h"
#include "client/rpc/unary_op.h"
#include "client/wire/chunk_codec.h"
#include "client/wire/piece_order.h"

namespace attend::client {

class ChunkedOp final : public RetryingOp, public std::enable_shared_from_this<ChunkedOp> {
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

  // What an event leads to on its own stream. Done without the lock: gRPC writes to the socket on
  // the calling thread, which takes as long as a piece's bytes do, and the other streams' threads
  // would wait for it. Nothing else happens to the stream meanwhile: its events all come to this
  // thread, and it does not finish while it reads or writes.
  struct Ops {
    bool read = false;
    bool half_close = false;
    grpc::ByteBuffer message;  // to write, if valid
  };
  static void Perform(Stripe& stripe, const Ops& ops);

  // All of these with mutex_ held.
  void StartAttempt();
  void StartStripe(int connection);
  void StartMoreStripes();
  static void Write(Stripe& stripe, grpc::ByteBuffer message, Ops* ops);
  void WriteNext(Stripe& stripe, Ops* ops);
  void FinishIfOver(Stripe& stripe);
  void StripeEnded(Stripe& stripe);
  void NoteFailure(Status status, const Pushback& pushback);
  void CancelStripes();
  void CancelLatecomers();
  CallOutcome TakeOutcome(Status status);
  Status UnjoinedFailure() const;
  Status AttemptStatus() const;
  // The same call as one message, or null if that is no way out of `status`.
  std::shared_ptr<UnaryOp> MakeMessageOp(const Status& status);

  // Enters with the lock and takes it again: bytes are copied without it.
  void TakeMessage(std::unique_lock<std::mutex>& lock, Stripe& stripe, Ops* ops);
  void EndCall(CallOutcome outcome);

  std::shared_ptr<const ChunkedCall> call_;
  std::shared_ptr<const EncodedCall> as_message_;
  const RetryPolicy policy_;
  const uint64_t seed_;
  std::atomic<bool>* const chunks_refused_;
  std::shared_ptr<UnaryOp> message_op_;  // once the call goes on as one message

  // Of the present attempt.
  std::vector<std::unique_ptr<Stripe>> stripes_;  // reserved: none moves while events are out
  int64_t open_stripes_ = 0;
  std::optional<v1::ChunkedGrant> grant_;  // the first stream's
  std::optional<ChunkedAnswer> answer_;
  PieceOrder pieces_;  // gives out what no stream has taken
  Status failure_;
  Pushback pushback_;
};

}  // namespace attend::client
