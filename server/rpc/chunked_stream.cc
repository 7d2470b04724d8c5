// SPDX-License-Identifier: Apache-2.0
//
// Any thread that has changed the state of the stream or its transfer calls Advance. Concurrent
// calls are harmless, because what has begun is marked (`reading_`, `writing_`, `finished_`) under
// the lock.

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

constexpr char kMethod[] = "/attend.v1.AttentionService/AttendChunked";
constexpr char kNoFirstMessage[] = "the stream ended before its first message";

}  // namespace

void ChunkedStream::Add(CallTable& table) {
  ServiceContext& context = table.context();
  const MessageBound bound = CallTable::Twice(context.chunked.options().chunk_bytes_max,
                                              "twice GetServerInfo's limits.chunk_bytes_max");
  table.Add(kMethod, bound, [&context](ServerCall& call) {
    WireCall wire(call);
    return BeginStream(context, kMethod, wire, [&](const Caller& caller, CountHold hold) {
      return Own(std::shared_ptr<ChunkedStream>(new ChunkedStream(
          context, ReadFacts(context, kMethod, caller, wire), std::move(wire), std::move(hold))));
    });
  });
}

void ChunkedStream::Advance() {
  const MutexLock lock(mutex_);
  AdvanceLocked();
}

void ChunkedStream::AdvanceLocked() {
  if (finished_) return;
  if (!transfer_ && !refusal_.ok()) return EndLocked(refusal_, {});
  if (transfer_) WriteLocked();
  const bool wanted = transfer_ ? !finished_ && !half_closed_ && transfer_->WantsBytes() &&
                                      unplaced_ < thresholds::kUnplacedChunksMax
                                : !std::exchange(asked_, true);
  if (!wanted || reading_) return;
  reading_ = true;
  wire_.Read();
}

void ChunkedStream::WriteLocked() {
  if (writing_) {
    // A chunk that is not read would keep a failed request's answer in memory.
    if (writing_chunk_ && transfer_->CutsOff() && !std::exchange(aborted_, true)) wire_.Cancel();
    return;
  }
  // Only if it can write, because the transfer relies on everything it hands out being written.
  StreamStep step = transfer_->Next(first_, granted_);
  if (step.finish) return EndLocked(step.status, step.refusal);
  if (!step.write) return;
  granted_ = writing_ = true;
  writing_chunk_ = step.chunk;
  wire_.Write(*std::move(step.write));
}

void ChunkedStream::EndLocked(const Status& status, const Refusal& refusal) {
  finished_ = true;
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

void ChunkedStream::EndWhenIdle() { EndUpload(Draining()); }

void ChunkedStream::Recheck() {
  {
    const MutexLock lock(mutex_);
    if (finished_ || !refusal_.ok()) return;
  }
  if (const Status may = caller_.Check(); !may.ok()) EndUpload(may);
}

void ChunkedStream::EndUpload(const Status& why) {
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    // A header is refused as usual; a token joins, and SetTransfer checks the caller again.
    if (TakesFirstLocked()) return;
    transfer = transfer_;
    RefuseLocked(why);
  }
  if (transfer) return transfer->FailUpload(why);
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
  TransferRef transfer;
  if (!TakeRead(true, transfer)) return;
  transfer ? TakeChunk(std::move(message)) : TakeFirst(std::move(message));
}

void ChunkedStream::OnHalfClose() {
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
  context_.workers.Post([self = Ref(this), held] { self->ParseFirst(std::move(*held)); });
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
  (void)RecordRefused(context_, InvalidArgument(kNoFirstMessage), wire_, facts_,
                      Transport::kChunked);
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
  const auto transfer =
      std::make_shared<ChunkedTransfer>(context_, facts, wire_, wire_.Deadline(), Ref(this));
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
  if (anothers) transfer = nullptr;
  Status status =
      transfer ? transfer->Join(Ref(this)) : Status(Code::kNotFound, "no request has this token");
  if (status.ok()) return SetTransfer(transfer, false);
  const std::string_view code = CodeName(status.code());
  context_.logger.Log(LogLevel::warn, "stream refused",
                      {{"code", code}, {"error", status.message()}, {"peer", wire_.Peer()}}, code);
  Refuse(std::move(status));
}

void ChunkedStream::SetTransfer(TransferRef transfer, bool first) {
  bool cancelled = false;
  Status may;
  {
    const MutexLock lock(mutex_);
    transfer_ = transfer;
    first_ = first;
    cancelled = cancelled_;
    may = caller_.Check();  // under the lock: otherwise the transfer may end the call meanwhile
  }
  if (cancelled) {
    transfer->FailCancelled();
  } else if (!may.ok()) {
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
  CopyPieces(context_.workers, pieces, [self = Ref(this), chunk, place, bytes]() mutable {
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
  SharedHandler::OnDone();
}

}  // namespace attend
