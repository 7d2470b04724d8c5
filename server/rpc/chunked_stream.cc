// SPDX-License-Identifier: Apache-2.0
//
// Advance is a loop: it determines the next step under the mutex and performs it after unlocking,
// until there is none. Any thread that has changed the state of the stream or its transfer calls
// it. Concurrent calls are harmless, because a step is marked as begun (`reading_`, `writing_`,
// `finished_`) under the same lock.

#include "server/rpc/chunked_stream.h"

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "server/memory/copy_pieces.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/open_stream.h"
#include "server/util/rejection.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

constexpr std::string_view kMethod = "/attend.v1.AttentionService/AttendChunked";
constexpr char kNoFirstMessage[] = "the stream ended before its first message";

}  // namespace

CallHandler* ChunkedStream::Open(ServiceContext& context, ServerCall& call) {
  H2Wire wire(call);
  const auto make = [&](const Caller& caller, CountHold hold) {
    const std::shared_ptr<ChunkedStream> stream(new ChunkedStream(
        context, ReadFacts(context, kMethod, caller, wire), std::move(wire), std::move(hold)));
    stream->self_ = stream;
    stream->watched_->Join(context.answers, stream->wire_);
    return stream.get();
  };
  return BeginStream(context, kMethod, wire, make);
}

void ChunkedStream::Advance() {
  for (;;) {
    Step step;
    Status end;
    Refusal refusal;
    {
      const MutexLock lock(mutex_);
      step = NextLocked();
      if (step == Step::kNone) return;
      if (step == Step::kFinish) {
        end = end_;
        refusal = end_refusal_;
      } else {
        ++starting_;
      }
    }
    if (step == Step::kFinish) return End(end, refusal);
    if (step == Step::kRead) wire_.Read();
    if (step == Step::kWrite) {
      watched_->Hold(1);  // until OnWritten
      wire_.Write(std::move(outgoing_));
    }
    if (step == Step::kCancel) wire_.Cancel();
    const MutexLock lock(mutex_);
    --starting_;
  }
}

ChunkedStream::Step ChunkedStream::NextLocked() {
  if (finished_) return Step::kNone;
  if (!transfer_) {
    if (!refusal_.ok()) {
      if (starting_ > 0) return Step::kNone;
      finished_ = true;
      end_ = refusal_;
      return Step::kFinish;
    }
    if (asked_) return Step::kNone;
    asked_ = reading_ = true;
    return Step::kRead;
  }
  const Step write = NextWriteLocked();
  if (write != Step::kNone) return write;
  if (finished_ || reading_ || half_closed_ || unplaced_ >= thresholds::kUnplacedChunksMax)
    return Step::kNone;
  if (!transfer_->WantsBytes()) return Step::kNone;
  reading_ = true;
  return Step::kRead;
}

ChunkedStream::Step ChunkedStream::NextWriteLocked() {
  if (writing_) {
    // A chunk that is not read would keep a failed request's answer in memory.
    if (!writing_chunk_ || aborted_ || !transfer_->CutsOff()) return Step::kNone;
    aborted_ = true;
    return Step::kCancel;
  }
  // Only if it can write, because the transfer relies on everything it hands out being written.
  StreamStep step = transfer_->Next(first_, granted_, watched_);
  switch (step.kind) {
    case StreamStep::Kind::kNone:
      return Step::kNone;
    case StreamStep::Kind::kWrite:
      granted_ = true;
      writing_ = true;
      writing_chunk_ = step.chunk;
      outgoing_ = std::move(step.message);
      return Step::kWrite;
    case StreamStep::Kind::kFinish:
      if (starting_ > 0) return Step::kNone;  // the thread in the wire checks again afterwards
      finished_ = true;
      end_ = std::move(step.status);
      end_refusal_ = std::move(step.refusal);
      return Step::kFinish;
  }
  return Step::kNone;
}

void ChunkedStream::End(const Status& status, const Refusal& refusal) {
  AddRefusal(context_, status.code(), refusal, wire_);
  hold_.Release();  // before the client learns of the end and opens another stream
  wire_.End(status);
}

void ChunkedStream::Refuse(Status status) {
  {
    const MutexLock lock(mutex_);
    RefuseLocked(std::move(status));
  }
  Advance();
}

void ChunkedStream::RefuseLocked(Status status) {
  if (!transfer_ && refusal_.ok()) refusal_ = std::move(status);
}

void ChunkedStream::EndWhenIdle() {
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    if (TakesFirstLocked()) return;  // a header is refused as usual; a token joins
    transfer = transfer_;
    RefuseLocked(Draining());
  }
  if (transfer) return transfer->FailUpload(Draining());
  Advance();
}

void ChunkedStream::Recheck() {
  {
    const MutexLock lock(mutex_);
    if (finished_ || !refusal_.ok()) return;
  }
  const Status may = caller_.Check();
  if (may.ok()) return;
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    if (TakesFirstLocked()) return;  // SetTransfer checks again
    transfer = transfer_;
    RefuseLocked(may);
  }
  if (transfer) return transfer->FailUpload(may);
  Advance();
}

bool ChunkedStream::TakeRead(bool message, TransferRef& transfer) {
  const MutexLock lock(mutex_);
  // A chunk counts as being read until its bytes are reserved: otherwise a half-close read in
  // between would find them missing.
  reading_ = message && transfer_ && !finished_;
  if (finished_ || !refusal_.ok()) return false;
  half_closed_ |= !message;
  transfer = transfer_;
  return true;
}

void ChunkedStream::OnMessage(InMessage message) {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  TransferRef transfer;
  if (!TakeRead(true, transfer)) return;
  transfer ? TakeChunk(std::move(message)) : TakeFirst(std::move(message));
}

void ChunkedStream::OnHalfClose() {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  TransferRef transfer;
  if (!TakeRead(false, transfer)) return;
  if (!transfer) return EndUnread();
  // Reads also end like this if the call was cancelled.
  wire_.Cancelled() ? transfer->FailCancelled() : transfer->HalfClosed();
  Advance();
}

void ChunkedStream::TakeFirst(InMessage message) {
  if (StaysOnThread(message.size())) return ParseFirst(std::move(message));
  const auto held = std::make_shared<InMessage>(std::move(message));
  context_.workers.Post([self = shared_from_this(), held] { self->ParseFirst(std::move(*held)); });
}

void ChunkedStream::EndUnread() {
  {
    const MutexLock lock(mutex_);
    unread_ = true;
    RefuseLocked(InvalidArgument(kNoFirstMessage));
  }
  Advance();
}

// Reads also end without a message if the call was cancelled, for example by a client whose answer
// arrived on other streams. Then there was no request. Which it was is known only in OnDone.
void ChunkedStream::RecordUnread() {
  if (wire_.Cancelled()) return;
  Request request;
  SetCaller(facts_.caller, request);
  request.id = context_.next_id.fetch_add(1, std::memory_order_relaxed);
  request.received = context_.clock.Now();
  request.transport = Transport::kChunked;
  request.status = InvalidArgument(kNoFirstMessage);
  RecordEnd(context_, request, 0, 0, wire_, facts_);
}

void ChunkedStream::ParseFirst(InMessage message) {
  auto first = std::make_shared<FirstMessage>();
  Status status = first->Parse(std::move(message), context_.chunked.options().chunk_bytes_max);
  if (status.ok() && first->has_token()) {
    // Charged for the message itself; the request it joins is charged separately.
    context_.limits.Came(facts_.caller.tenant, first->message_bytes());
    return JoinTransfer(first->token());
  }
  BeginTransfer(std::move(first), std::move(status));
}

void ChunkedStream::BeginTransfer(std::shared_ptr<FirstMessage> first, Status parsed) {
  CallFacts facts = facts_;
  GiveSpan(context_, facts, wire_);  // the request's span; joining streams have none
  const TransferRef transfer = TransferRef::Adopt(
      new ChunkedTransfer(context_, facts, wire_, wire_.Deadline(), shared_from_this()));
  SetTransfer(transfer, true);
  context_.workers.Post(
      [transfer, first, parsed = std::move(parsed)] { transfer->Begin(*first, parsed); });
}

void ChunkedStream::JoinTransfer(const std::string& token) {
  TransferRef transfer = context_.chunked.Find(token);
  // For other tenants it does not exist. Without authentication, the tenant named by a joining
  // stream is ignored.
  const bool anothers =
      transfer && facts_.caller.authenticated() && transfer->tenant() != facts_.caller.tenant;
  if (anothers) transfer = TransferRef();
  Status status = transfer ? transfer->Join(shared_from_this())
                           : Status(Code::kNotFound, "no request has this token");
  if (status.ok()) return SetTransfer(transfer, false);
  const std::string_view code = CodeName(status.code());
  context_.logger.Log(LogLevel::warn, "stream refused",
                      {{"code", code}, {"error", status.message()}, {"peer", wire_.Peer()}}, code);
  Refuse(std::move(status));
}

void ChunkedStream::SetTransfer(TransferRef transfer, bool first) {
  bool cancelled = false;
  {
    const MutexLock lock(mutex_);
    transfer_ = transfer;
    first_ = first;
    cancelled = cancelled_;
  }
  if (cancelled) {
    transfer->FailCancelled();
  } else if (const Status may = caller_.Check(); !may.ok()) {
    transfer->FailUpload(may);
  }
  Advance();
}

void ChunkedStream::TakeChunk(InMessage message) {
  const int64_t bytes_max = context_.chunked.options().chunk_bytes_max;
  const int64_t message_bytes = message.size();
  auto chunk = std::make_shared<ChunkMessage>();
  Status status = chunk->Take(std::move(message), bytes_max + kChunkMarginBytes);
  if (status.ok()) status = chunk->ParseChunk(bytes_max);
  PlaceChunk(std::move(chunk), message_bytes, std::move(status));
}

void ChunkedStream::PlaceChunk(std::shared_ptr<ChunkMessage> chunk, int64_t message_bytes,
                               Status status) {
  ChunkPlace place;
  if (status.ok()) status = transfer().Reserve(*chunk, &place);
  if (!status.ok()) {
    transfer().FailUpload(std::move(status), message_bytes);
  }
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (place.data == nullptr) return;  // no further chunk is wanted either
    ++unplaced_;
  }
  Advance();  // the next read starts before this chunk is copied
  const int64_t bytes = chunk->bytes();
  if (place.copy == nullptr && StaysOnThread(bytes)) {
    for (const HostPiece& piece : chunk->Pieces(place.data)) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    }
    chunk.reset();  // returns the memory to the transport
    return ChunkPlaced(bytes);
  }
  chunk->Own();
  const std::vector<HostPiece> pieces = chunk->Pieces(place.data);
  CopyPieces(context_.workers, pieces, [self = shared_from_this(), chunk, place, bytes]() mutable {
    chunk.reset();
    if (place.copy != nullptr) place.copy->Arrived(place.data, bytes);
    self->ChunkPlaced(bytes);
  });
}

void ChunkedStream::ChunkPlaced(int64_t bytes) {
  transfer().Placed(bytes);
  {
    const MutexLock lock(mutex_);
    --unplaced_;
  }
  Advance();
}

void ChunkedStream::OnWritten(bool ok) {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  watched_->Release(1);
  bool chunk;
  {
    const MutexLock lock(mutex_);
    writing_ = false;
    chunk = std::exchange(writing_chunk_, false);
  }
  if (chunk) {
    transfer().Written(ok);
  } else if (!ok) {
    transfer().FailCancelled();
  }
  Advance();
}

void ChunkedStream::OnCancel() {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    if (finished_) return;
    cancelled_ = true;
    if (TakesFirstLocked()) return;  // SetTransfer checks cancelled_
    transfer = transfer_;
    RefuseLocked(Status(Code::kCancelled, "the call was cancelled"));
  }
  if (transfer) return transfer->FailCancelled();
  Advance();
}

void ChunkedStream::OnDone() {
  watched_->Leave();
  bool unread = false;
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    unread = unread_;
    transfer = transfer_;
  }
  if (unread) RecordUnread();
  context_.streams.Remove(this);
  if (transfer) transfer->Leave(this);
  self_.reset();
}

}  // namespace attend
