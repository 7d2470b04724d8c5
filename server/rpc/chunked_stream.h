// SPDX-License-Identifier: Apache-2.0
//
// One stream of AttendChunked. It reads chunks, passes their bytes to the transfer that it began or
// joined, and writes what the transfer has for it. Backpressure in both directions: at most two
// chunks are read but not placed, and one write is in progress.
//
//   asked --1--> in hand --2--> carrying --5--> finished
//     |             |                               ^
//     3             4                               |
//     +-> refused <-+                               |
//            +-------------------6------------------+
//
// 1  OnMessage: the first message has arrived; it is "in hand" until it is parsed.
// 2  SetTransfer: the message is a header or malformed, and begins a transfer (which fails if it is
//    malformed); or its token names a transfer, which the stream joins.
// 3  RefuseLocked: the call was cancelled, the server drains, the caller lost its right, or there
//    is no first message.
// 4  JoinTransfer: no transfer of the caller's tenant has the token, or it accepts no more streams.
// 5  NextWriteLocked: the transfer lets the stream finish (chunked_transfer.h), and no write is in
//    progress.
// 6  NextLocked.
//
// A stream finishes only when no thread is calling its wire. A cancellation while the first message
// is in hand is passed on to its transfer. While carrying, reads and writes are independent:
//
//   reads    idle --a--> reading --b--> placing --c--> done      (each chunk)
//   writes   idle --d--> writing --e--> idle
//
// a  NextLocked: the transfer wants bytes, the client has not half-closed, and fewer than two
//    chunks are being placed.
// b  PlaceChunk: the chunk's bytes are reserved, so the next read may start. An unwanted or invalid
//    chunk is dropped here.
// c  ChunkPlaced: the bytes are copied, and the transfer counts them.
// d  NextWriteLocked: the transfer has a grant, the answer's header or a chunk for this stream.
// e  OnWritten. A chunk that the client does not read is aborted by cancelling the call.
//
// The transport enters through the On... methods, other threads through Advance. A mutex guards the
// state and is not held while the wire is called; `starting_` keeps the call from finishing during
// that time. Lives until the transport is done with it and no reference is left.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/chunked_transfer.h"
#include "server/rpc/h2_wire.h"
#include "server/rpc/standing_caller.h"
#include "server/transport/server_call.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class ChunkedStream final : public CallHandler,
                            public TransferStream,
                            public OpenCall,
                            public std::enable_shared_from_this<ChunkedStream> {
 public:
  // Creates and begins a stream, which owns itself until OnDone. Returns the call's handler, also
  // if the call was refused.
  static CallHandler* Open(ServiceContext& context, ServerCall& call);

  void Begin() { Advance(); }
  // TransferStream
  void Advance() override;

  // OpenCall. A request with missing bytes does not count as accepted.
  void EndWhenIdle() override;
  void Recheck() override;

  // CallHandler
  void OnMessage(InMessage message) override;
  void OnHalfClose() override;
  void OnWritten(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Step { kNone, kRead, kWrite, kCancel, kFinish };

  ChunkedStream(ServiceContext& context, const CallFacts& facts, H2Wire&& wire, CountHold hold)
      : context_(context), facts_(facts), wire_(std::move(wire)), hold_(std::move(hold)) {}

  // Whether the first message has arrived but has not been handled yet.
  bool TakesFirstLocked() const ATTEND_REQUIRES(mutex_) {
    return !transfer_ && asked_ && !reading_ && refusal_.ok();
  }
  // The transfer, which must be set and is kept until the stream is destroyed.
  ChunkedTransfer& transfer() {
    const MutexLock lock(mutex_);
    return *transfer_.get();
  }
  Step NextLocked() ATTEND_REQUIRES(mutex_);
  Step NextWriteLocked() ATTEND_REQUIRES(mutex_);
  void End(const Status& status, const Refusal& refusal);
  // These end a stream without a transfer. After RefuseLocked, Advance() must be called. Its caller
  // must have checked under the same lock that there is no transfer and no first message in hand:
  // otherwise a request may begin that relies on the stream's call.
  void RefuseLocked(Status status) ATTEND_REQUIRES(mutex_);
  void Refuse(Status status);
  // Notes that a message, or the half-close, was read. Sets `transfer` if there is one. False: it
  // crossed the end of the call.
  bool TakeRead(bool message, TransferRef& transfer);
  void TakeFirst(InMessage message);
  void EndUnread();
  void RecordUnread();
  void ParseFirst(InMessage message);
  void BeginTransfer(std::shared_ptr<FirstMessage> first, Status parsed);
  void JoinTransfer(const std::string& token);
  void SetTransfer(TransferRef transfer, bool first);
  void TakeChunk(InMessage message);
  // `status`: whether the message is a valid chunk.
  void PlaceChunk(std::shared_ptr<ChunkMessage> chunk, int64_t message_bytes, Status status);
  void ChunkPlaced(int64_t bytes);

  ServiceContext& context_;
  const CallFacts facts_;
  const H2Wire wire_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kCompute};
  CountHold hold_;                       // released by End
  std::shared_ptr<ChunkedStream> self_;  // until OnDone
  const WatchedRef watched_ = std::make_shared<WatchedCall>();

  Mutex mutex_;
  OutMessage outgoing_;  // set with kWrite, for the thread that performs it
  TransferRef transfer_ ATTEND_GUARDED_BY(mutex_);  // set once
  Status refusal_ ATTEND_GUARDED_BY(mutex_);        // why the stream ends without a transfer
  Status end_ ATTEND_GUARDED_BY(mutex_);            // set with kFinish
  Refusal end_refusal_ ATTEND_GUARDED_BY(mutex_);
  bool first_ ATTEND_GUARDED_BY(mutex_) = false;    // it is the first stream of its transfer
  bool granted_ ATTEND_GUARDED_BY(mutex_) = false;  // its grant has been sent
  int64_t starting_ ATTEND_GUARDED_BY(mutex_) = 0;  // threads that are calling the wire
  int64_t unplaced_ ATTEND_GUARDED_BY(mutex_) = 0;  // chunks read but not placed
  bool asked_ ATTEND_GUARDED_BY(mutex_) = false;    // the first message has been requested
  // A read is in progress, or a chunk was read and its bytes are not reserved yet.
  bool reading_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_chunk_ ATTEND_GUARDED_BY(mutex_) = false;
  bool half_closed_ ATTEND_GUARDED_BY(mutex_) = false;
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
  bool unread_ ATTEND_GUARDED_BY(mutex_) = false;   // reads ended before the first message
  bool aborted_ ATTEND_GUARDED_BY(mutex_) = false;  // by this server, to end an unread write
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
