// SPDX-License-Identifier: Apache-2.0
//
// A connection alternates between reads and a flush at the end of each turn of its loop, so all
// that a turn produces leaves in one write. Reads stop while the session's output is full.
//
// The read buffer depends on the newest message. Small messages share the loop's buffer. Messages
// of kLargeBytes or more are read into blocks, where they can stay. If the handler has given a
// message places, the rest of a frame is read straight to its place. Invariant: at most one block
// per connection is partly used, and none is held without calls.

#include "server/transport/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "server/transport/tls_channel.h"

namespace attend {
namespace {

constexpr double kAgeSpread = 0.1;
// Messages of at least this size are read into blocks.
constexpr size_t kLargeBytes = size_t{64} << 10;
// A frame of at least this size is read by itself if its bytes have a place. The read also takes
// the head of the next frame. The first bytes of a message, from which its places are known, are
// fewer than kBeginBytes.
constexpr size_t kLargeFrameBytes = size_t{64} << 10;
constexpr size_t kPlacedReadBytesMin = 4096;
constexpr size_t kFrameHeadBytes = 9;
constexpr size_t kBeginBytes = 4096;
// A block with less room than this is not filled further.
constexpr size_t kBlockRoomMin = TlsChannel::kBufferBytesMin;

CallMetadata HttpStatus(std::string_view status) {
  CallMetadata headers;
  headers.Add(":status", status);
  return headers;
}

CallMetadata GrpcStatus(const Status& status) {
  CallMetadata headers = HttpStatus("200");
  headers.Add("content-type", "application/grpc");
  headers.Add("grpc-status", std::to_string(static_cast<int>(status.code())));
  headers.Add("grpc-message", PercentEncode(status.message()));
  return headers;
}

}  // namespace

Connection::Connection(LoopShare& share, std::unique_ptr<Channel> channel, ConnectionPeer peer,
                       std::unique_ptr<ConnectionGuard> guard)
    : share_(share),
      channel_(std::move(channel)),
      peer_(std::make_shared<const ConnectionPeer>(std::move(peer))),
      guard_(std::move(guard)),
      window_(share.busy, channel_->round_trip_us()),
      unfinished_calls_(std::make_shared<std::atomic<int64_t>>(0)) {
  Http2Session::Owner& owner = *this;
  Http2Session::Limits limits = share_.options.session;
  limits.connection_window_bytes = std::min(limits.connection_window_bytes, WindowShare::kBytesMin);
  session_.emplace(limits, owner, share_.clock);
}

void Connection::Run() {
  if (closed_) {
    delete this;
  } else if (!begun_) {
    Begin();
  }
}

void Connection::Begin() {
  begun_ = true;
  opened_at_ = idle_since_ = share_.clock.Now();
  std::uniform_real_distribution<double> spread(1 - kAgeSpread, 1 + kAgeSpread);
  drain_at_ = opened_at_ +
              std::chrono::duration_cast<Duration>(share_.options.age_max * spread(share_.random));
  try {
    index_ = share_.connections.size();
    share_.connections.push_back(this);
  } catch (const std::bad_alloc&) {
    index_ = kNoIndex;
    return Close(ResourceExhausted("no memory for another connection"));
  }
  if (!channel_->IsTrusted()) return Close(Status());
  events_ = EPOLLIN;
  const Status watched = share_.loop.Watch(channel_->socket(), events_, *this);
  if (!watched.ok()) return Close(ResourceExhausted(watched.message()));
  OnOutput();  // sends the SETTINGS frame
  SetTimer();
}

void Connection::OnEvents(uint32_t events) {
  if (closed_) return;
  if ((events & EPOLLOUT) != 0) {
    blocked_ = false;
    OnOutput();
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) Read();
}

std::span<char> Connection::ReadBuffer(bool after_place) {
  if (message_bytes_ < kLargeBytes) return share_.buffer;
  if (message_placed_) {
    ReleaseBlock();
    const bool large = channel_->is_plain() && session_->data_frame_bytes() >= kLargeFrameBytes;
    return large ? share_.buffer.first(after_place ? kFrameHeadBytes : kBeginBytes) : share_.buffer;
  }
  if (block_.referenced_bytes == 0) block_.used_bytes = 0;
  if (BlockPool::kBlockBytes - block_.used_bytes < kBlockRoomMin) {
    // A client that mixes large messages with much other data would keep block after block alive.
    block_wasted_ |= block_.referenced_bytes < block_.used_bytes / 2;
    ReleaseBlock();
  }
  if (block_.memory == nullptr) {
    if (block_wasted_) return share_.buffer;
    block_.memory = share_.blocks.Take();
    OnKept(BlockPool::kBlockBytes);
  }
  return {block_.memory.get() + block_.used_bytes, BlockPool::kBlockBytes - block_.used_bytes};
}

void Connection::ReleaseBlock() {
  if (block_.memory != nullptr) OnKept(-static_cast<int64_t>(BlockPool::kBlockBytes));
  block_ = {};
}

void Connection::Read() try {
  std::span<char> place = channel_->is_plain() ? session_->Room() : std::span<char>();
  if (place.size() < kPlacedReadBytesMin) place = {};
  const std::span<char> buffer = ReadBuffer(!place.empty());
  const ssize_t bytes =
      place.empty() ? channel_->Read(buffer, share_.scratch) : channel_->ReadTo(place, buffer);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
    if (channel_->wants_write()) OnOutput();
    if (calls_.empty()) ReleaseBlock();
    return;
  }
  if (bytes <= 0) {
    return Close(channel_->wrong().empty() ? Status() : InvalidArgument(channel_->wrong()));
  }
  if (closing_) return;  // it is being told why, and not read any more
  const size_t in_place = std::min(static_cast<size_t>(bytes), place.size());
  Status status = Receive(place.first(in_place));
  if (status.ok()) status = Receive(buffer.first(static_cast<size_t>(bytes) - in_place));
  if (session_->frame_count() > 0 && !std::exchange(spoke_, true) && guard_ != nullptr) {
    guard_->OnFirstFrame();
  }
  if (calls_.empty()) ReleaseBlock();
  if (!status.ok()) {
    closing_ = true;
    end_status_ = status;
  }
  OnOutput();
  if (!closed_ && channel_->ended()) Close(Status());
} catch (const std::bad_alloc&) {
  Close(ResourceExhausted("no memory for received bytes"));
}

Status Connection::Receive(std::span<char> bytes) {
  if (bytes.empty()) return Status();
  const char* const block = block_.memory.get();
  reading_block_ = block != nullptr && bytes.data() == block + block_.used_bytes;
  if (reading_block_) block_.used_bytes += bytes.size();
  Status status = session_->Receive({bytes.data(), bytes.size()});
  reading_block_ = false;
  return status;
}

void Connection::OnTurnEnd() {
  if (!closed_) Flush();
}

bool Connection::WriteSome() {
  OutputQueue& output = session_->output();
  const ssize_t bytes = channel_->Write(output, share_.scratch);
  if (bytes >= 0) {
    output.Consume(static_cast<size_t>(bytes));
    while (!leaving_.empty() && leaving_.front().last <= output.gone()) {
      CallStream& call = *leaving_.front().call;
      leaving_.pop_front();
      call.OnLeft(/*arrived=*/true);
    }
    return true;
  }
  if (errno == EINTR) return true;
  if (errno == EAGAIN) {
    blocked_ = true;
  } else {
    Close(Status());
  }
  return false;
}

void Connection::Flush() {
  for (;;) {
    if (!closing_ || session_->wants_send()) {
      const Status sent = session_->Send();
      if (!sent.ok()) return Close(sent);
    }
    if (session_->output().empty() && !channel_->wants_write()) break;
    if (blocked_ || !WriteSome()) break;
  }
  if (closed_) return;
  const bool all_sent = session_->output().empty();
  // A single attempt to send the reason: the client may not be reading.
  if (closing_) return Close(end_status_);
  if (all_sent && session_->over()) return Close(session_->wrong());
  SetEvents();
}

void Connection::SetEvents() {
  // Backpressure: a client that does not read is not read either.
  const bool full = session_->output().size() >= share_.options.session.output_bytes_max;
  const uint32_t events = (full ? 0 : uint32_t{EPOLLIN}) | (blocked_ ? uint32_t{EPOLLOUT} : 0);
  if (events == events_) return;
  events_ = events;
  share_.loop.Rewatch(channel_->socket(), events_, *this);
}

void Connection::SetTimer() {
  if (closed_ || session_->drain_ended()) return;
  const ConnectionOptions& options = share_.options;
  TimePoint due = drain_at_;
  if (!spoke_) due = std::min(due, opened_at_ + options.handshake_timeout);
  if (calls_.empty()) due = std::min(due, idle_since_ + options.idle_timeout);
  if (session_->draining()) due = share_.clock.Now() + options.drain_timeout;
  try {
    share_.loop.Set(*this, due);
  } catch (const std::bad_alloc&) {
    Close(ResourceExhausted("no memory for another connection"));
  }
}

void Connection::OnTime() {
  const TimePoint now = share_.clock.Now();
  const ConnectionOptions& options = share_.options;
  if (session_->draining()) {
    session_->EndDrain();
    return OnOutput();
  }
  if (!spoke_ && now - opened_at_ >= options.handshake_timeout) {
    return Close(Unavailable("no frame arrived in time (--handshake-timeout)"));
  }
  const bool idle = calls_.empty() && now - idle_since_ >= options.idle_timeout;
  if (idle || now >= drain_at_) return Drain();
  SetTimer();
}

bool Connection::Refuse(int32_t id, const RequestHead& head) {
  CallMetadata answer;
  if (head.method != "POST") {
    answer = HttpStatus("405");
  } else if (!head.grpc) {
    answer = HttpStatus("415");
  } else if (head.too_large) {
    answer = GrpcStatus(
        ResourceExhausted("the metadata has more than " +
                          std::to_string(share_.options.session.header_list_bytes_max) + " bytes"));
  } else if (head.malformed) {
    answer = GrpcStatus(Internal("a value of binary metadata is not base64"));
  } else if (head.timeout && !ParseTimeout(*head.timeout)) {
    answer = GrpcStatus(
        InvalidArgument("grpc-timeout is '" + *head.timeout +
                        "', must be 1 to 8 digits and a unit, one of H, M, S, m, u and n"));
  } else {
    return false;
  }
  session_->RespondWhole(id, answer);
  return true;
}

Http2Stream* Connection::OnRequest(int32_t id, RequestHead&& head) {
  if (closing_ || Refuse(id, head)) return nullptr;
  if (unfinished_calls_->load(std::memory_order_relaxed) >= share_.options.calls_max) {
    session_->Reset(id, NGHTTP2_REFUSED_STREAM);
    return nullptr;
  }
  calls_.reserve(calls_.size() + 1);
  TimePoint deadline = kNever;
  if (head.timeout) {
    const TimePoint now = share_.clock.Now();
    const Duration left = *ParseTimeout(*head.timeout);
    if (left < kNever - now) deadline = now + left;
  }
  const MessageBound bound = share_.methods.MessageBoundOf(head.path);
  auto* const call =
      new CallStream(share_.calls, *this, id, head, peer_, deadline, bound, unfinished_calls_);
  const Status open = guard_ == nullptr ? Status() : guard_->OpenCall();
  if (!open.ok()) {
    call->Drop();
    EndFor(open);
    return nullptr;
  }
  call->place = calls_.size();
  calls_.push_back(call);
  try {
    call->Begin(share_.methods);
  } catch (const std::bad_alloc&) {
    OnStreamClosed(*call, /*whole=*/false);
    call->Drop();
    session_->RespondWhole(id, GrpcStatus(ResourceExhausted("no memory for the call")));
    return nullptr;
  }
  return call;
}

void Connection::OnMessageLength(size_t bytes, bool placed) {
  message_bytes_ = bytes;
  message_placed_ = placed;
  window_.SetLarge(bytes >= kLargeBytes);
  if (bytes < kLargeBytes) return;
  const int32_t window = window_.Bytes(share_.options.session.connection_window_bytes);
  const Status set = session_->SetWindow(window);
  if (!set.ok()) EndFor(set);
}

void Connection::OnMessageBytes(size_t bytes) {
  came_bytes_ += static_cast<int64_t>(bytes);
  if (guard_ != nullptr) guard_->OnMessageBytes(static_cast<int64_t>(bytes));
}

void Connection::OnKept(int64_t bytes) {
  if (guard_ != nullptr) guard_->OnKept(bytes);
}

void Connection::EndFor(const Status& why) {
  if (std::exchange(closing_, true)) return;
  end_status_ = why;
  session_->Terminate(NGHTTP2_ENHANCE_YOUR_CALM);
  OnOutput();
}

bool Connection::OnStreamClosed(CallStream& call, bool whole) {
  const bool leaves = whole && !closed_ && !session_->output().empty();
  if (leaves) leaving_.push_back({&call, session_->output().added()});
  calls_.back()->place = call.place;
  std::swap(calls_[call.place], calls_.back());
  calls_.pop_back();
  if (calls_.empty()) {
    window_.SetLarge(false);
    block_wasted_ = false;
    if (!reading_block_) ReleaseBlock();
  }
  if (guard_ != nullptr) guard_->CloseCall();
  if (calls_.empty() && !closed_ && !session_->draining()) {
    idle_since_ = share_.clock.Now();
    SetTimer();
  }
  return leaves;
}

void Connection::Drain() {
  if (closed_ || session_->draining()) return;
  session_->Drain();
  OnOutput();
  SetTimer();
}

void Connection::Close(Status why) {
  if (std::exchange(closed_, true)) return;
  share_.loop.Clear(*this);
  share_.loop.Forget(*this);
  share_.loop.Unwatch(channel_->socket());
  // Each call removes itself from the list and may delete itself; the session is no longer used.
  while (!calls_.empty()) calls_.back()->OnClose();
  for (; !leaving_.empty(); leaving_.pop_front()) leaving_.front().call->OnLeft(false);
  session_.reset();
  if (guard_ != nullptr) guard_->OnEnd(why);
  if (why.ok()) {
    channel_->End();
  } else {
    // Resets the connection; otherwise a client whose bytes no longer fit the socket waits for a
    // minute.
    const linger at_once{1, 0};
    setsockopt(channel_->socket(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
  channel_.reset();
  if (index_ != kNoIndex) {
    share_.connections.back()->index_ = index_;
    std::swap(share_.connections[index_], share_.connections.back());
    share_.connections.pop_back();
  }
  share_.connections_count.fetch_sub(1, std::memory_order_relaxed);
  share_.loop.Post(*this);  // deletes it, after any event of this turn that could refer to it
}

}  // namespace attend
