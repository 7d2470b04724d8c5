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
// 5  WriteLocked: the transfer lets the stream finish (chunked_transfer.h), and no write is in
//    progress.
// 6  AdvanceLocked.
//
// A cancellation while the first message is in hand is passed on to its transfer. While carrying,
// reads and writes are independent:
//
//   reads    idle --a--> reading --b--> placing --c--> done      (each chunk)
//   writes   idle --d--> writing --e--> idle
//
// a  AdvanceLocked: the transfer wants bytes, the client has not half-closed, and fewer than two
//    chunks are being placed.
// b  PlaceChunk: the chunk's bytes are reserved, so the next read may start. An unwanted or invalid
//    chunk is dropped here.
// c  ChunkPlaced: the bytes are copied, and the transfer counts them.
// d  WriteLocked: the transfer has a grant, the answer's header or a chunk for this stream.
// e  OnWritten. A chunk that the client does not read is aborted by cancelling the call.
//
// The transport enters through the On... methods, other threads through Advance. A mutex guards the
// state; the transport's functions are called with it held.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/rpc/chunked_transfer.h"
#include "server/rpc/standing_caller.h"
#include "server/rpc/wire_call.h"
#include "server/transport/server_call.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class ChunkedStream final : public SharedHandler, public TransferStream, public OpenCall {
 public:
  // Adds the method.
  static void Add(CallTable& table);
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
  ChunkedStream(ServiceContext& context, const CallFacts& facts, WireCall&& wire, CountHold hold)
      : context_(context), facts_(facts), wire_(std::move(wire)), hold_(std::move(hold)) {}

  // Whether the first message has arrived but has not been handled yet.
  bool TakesFirstLocked() const ATTEND_REQUIRES(mutex_) {
    return !transfer_ && asked_ && !reading_ && refusal_.ok();
  }
  // The transfer, which must be set and is kept until the stream is destroyed.
  ChunkedTransfer& transfer() {
    const MutexLock lock(mutex_);
    return *transfer_;
  }
  // Does what the state now allows.
  void AdvanceLocked() ATTEND_REQUIRES(mutex_);
  void WriteLocked() ATTEND_REQUIRES(mutex_);
  void EndLocked(const Status& status, const Refusal& refusal) ATTEND_REQUIRES(mutex_);
  // These end a stream without a transfer. After RefuseLocked, Advance() must be called. Its caller
  // must have checked under the same lock that there is no transfer and no first message in hand:
  // otherwise a request may begin that relies on the stream's call.
  void RefuseLocked(Status status) ATTEND_REQUIRES(mutex_);
  void Refuse(Status status);
  // Ends the stream, or its transfer while bytes are missing.
  void EndUpload(const Status& why);
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
  const WireCall wire_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kCompute};
  CountHold hold_;  // until the end

  Mutex mutex_;
  TransferRef transfer_ ATTEND_GUARDED_BY(mutex_);  // set once
  Status refusal_ ATTEND_GUARDED_BY(mutex_);        // why the stream ends without a transfer
  bool first_ ATTEND_GUARDED_BY(mutex_) = false;    // it is the first stream of its transfer
  bool granted_ ATTEND_GUARDED_BY(mutex_) = false;  // its grant has been sent
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
