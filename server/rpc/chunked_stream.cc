// SPDX-License-Identifier: Apache-2.0

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
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

constexpr std::string_view kMethod = "/attend.v1.AttentionService/AttendChunked";
constexpr char kNoFirstMessage[] = "the stream ended before its first message";

}  // namespace

Status ChunkedStream::Open(ServiceContext& context, StreamWire& wire) {
  const auto make = [&](const Caller& caller, CountHold hold) {
    const std::shared_ptr<ChunkedStream> stream(new ChunkedStream(
        context, ReadFacts(context, kMethod, caller, wire.call()), wire, std::move(hold)));
    stream->self_ = stream;
    stream->watched_->Join(context.answers, stream->call_);
    wire.Give(*stream);
    return stream.get();
  };
  return BeginStream(context, kMethod, wire.call(), make);
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
    if (step == Step::kRead) wire_.Read(&incoming_);
    if (step == Step::kWrite) {
      watched_->Hold(1);  // until OnWriteDone
      wire_.Write(&outgoing_, /*hurries=*/true);
    }
    if (step == Step::kCancel) call_.Cancel();
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
    // A chunk that is not read would keep a failed request's answer.
    if (!writing_chunk_ || aborted_ || !transfer_->CutsOff()) return Step::kNone;
    aborted_ = true;
    return Step::kCancel;
  }
  // The transfer counts on what it hands out being written, so this asks only if it can write.
  StreamStep step = transfer_->Next(first_, granted_, watched_);
  switch (step.kind) {
    case StreamStep::Kind::kNone:
      return Step::kNone;
    case StreamStep::Kind::kWrite:
      granted_ = true;
      writing_ = true;
      writing_chunk_ = step.chunk;
      outgoing_.Swap(&step.message);
      return Step::kWrite;
    case StreamStep::Kind::kFinish:
      if (starting_ > 0) return Step::kNone;  // the thread in the wire looks again afterwards
      finished_ = true;
      end_ = std::move(step.status);
      end_refusal_ = std::move(step.refusal);
      return Step::kFinish;
  }
  return Step::kNone;
}

void ChunkedStream::End(const Status& status, const Refusal& refusal) {
  AddRefusal(context_, status.code(), refusal, call_);
  hold_.Release();  // before the client hears of it and opens another
  wire_.End(ToGrpc(status));
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
    if (TakesFirstLocked()) return;  // a header is refused as usual, a token joins
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
    if (TakesFirstLocked()) return;  // SetTransfer asks again
    transfer = transfer_;
    RefuseLocked(may);
  }
  if (transfer) return transfer->FailUpload(may);
  Advance();
}

void ChunkedStream::OnReadDone(bool ok) {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  grpc::ByteBuffer message;
  TransferRef transfer;
  {
    const MutexLock lock(mutex_);
    // A chunk counts as being read until its bytes are reserved: a half-close read meanwhile would
    // find them missing.
    reading_ = ok && transfer_ && !finished_;
    if (finished_ || !refusal_.ok()) return;  // it crossed the end of the call
    half_closed_ |= !ok;
    transfer = transfer_;
    if (ok) message.Swap(&incoming_);
  }
  if (!transfer) return TakeFirst(ok, std::move(message));
  if (ok) return TakeChunk(std::move(message));
  // Reads also end like this if the call was cancelled.
  if (call_.Cancelled()) {
    transfer->FailCancelled();
  } else {
    transfer->HalfClosed();
  }
  Advance();
}

void ChunkedStream::TakeFirst(bool ok, grpc::ByteBuffer&& message) {
  if (!ok) return EndUnread();
  if (StaysOnThread(static_cast<int64_t>(message.Length()))) return ParseFirst(message);
  const auto held = std::make_shared<grpc::ByteBuffer>();
  held->Swap(&message);
  context_.workers.Post([self = shared_from_this(), held] { self->ParseFirst(*held); });
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
// came over other streams. Then there was no request. Only in OnDone is it known which it was.
void ChunkedStream::RecordUnread() {
  if (call_.Cancelled()) return;
  Request request;
  SetCaller(facts_.caller, request);
  request.id = context_.next_id.fetch_add(1, std::memory_order_relaxed);
  request.received = context_.clock.Now();
  request.transport = Transport::kChunked;
  request.status = InvalidArgument(kNoFirstMessage);
  RecordEnd(context_, request, 0, 0, call_, facts_);
}

void ChunkedStream::ParseFirst(grpc::ByteBuffer& message) {
  auto first = std::make_shared<FirstMessage>();
  Status status = first->Parse(message, context_.chunked.options().chunk_bytes_max);
  if (status.ok() && first->has_token()) {
    // Whatever the request it joins is charged, the message came.
    context_.limits.Came(facts_.caller.tenant, first->message_bytes());
    return JoinTransfer(first->token());
  }
  BeginTransfer(std::move(first), std::move(status));
}

void ChunkedStream::BeginTransfer(std::shared_ptr<FirstMessage> first, Status parsed) {
  CallFacts facts = facts_;
  GiveSpan(context_, facts, call_);  // the request's: streams that join it have none
  const TransferRef transfer = TransferRef::Adopt(new ChunkedTransfer(
      context_, facts, call_, call_.Deadline(context_.clock), shared_from_this()));
  SetTransfer(transfer, true);
  context_.workers.Post(
      [transfer, first, parsed = std::move(parsed)] { transfer->Begin(*first, parsed); });
}

void ChunkedStream::JoinTransfer(const std::string& token) {
  TransferRef transfer = context_.chunked.Find(token);
  // To others it does not exist. Where callers are not authenticated, what a joining stream says of
  // its tenant is ignored.
  const bool anothers =
      transfer && facts_.caller.authenticated() && transfer->tenant() != facts_.caller.tenant;
  if (anothers) transfer = TransferRef();
  Status status = transfer ? transfer->Join(shared_from_this())
                           : Status(Code::kNotFound, "no request has this token");
  if (status.ok()) return SetTransfer(transfer, false);
  const std::string_view code = CodeName(status.code());
  context_.logger.Log(LogLevel::warn, "stream refused",
                      {{"code", code}, {"error", status.message()}, {"peer", call_.Peer()}}, code);
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

void ChunkedStream::TakeChunk(grpc::ByteBuffer&& message) {
  const int64_t bytes_max = context_.chunked.options().chunk_bytes_max;
  const auto message_bytes = static_cast<int64_t>(message.Length());
  auto chunk = std::make_shared<ChunkMessage>();
  Status status = chunk->Take(message, bytes_max + kChunkMarginBytes);
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
  Advance();  // the next read is under way before this chunk is copied
  std::vector<HostPiece> pieces = chunk->Pieces(place.data);
  const int64_t bytes = chunk->bytes();
  if (place.copy == nullptr && StaysOnThread(bytes)) {
    for (const HostPiece& piece : pieces) {
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    }
    chunk.reset();  // the transport gets its memory back
    return ChunkPlaced(bytes);
  }
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

void ChunkedStream::OnWriteDone(bool ok) {
  const std::shared_ptr<ChunkedStream> self = shared_from_this();
  watched_->Release(1);
  bool chunk;
  {
    const MutexLock lock(mutex_);
    writing_ = false;
    chunk = std::exchange(writing_chunk_, false);
    outgoing_.Clear();
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
    if (TakesFirstLocked()) return;  // SetTransfer looks at cancelled_
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
