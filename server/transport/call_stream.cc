// SPDX-License-Identifier: Apache-2.0

#include "server/transport/call_stream.h"

#include <array>
#include <new>
#include <utility>

#include "server/transport/connection.h"

namespace attend {
namespace {

// A message is written once no more than this many bytes of its call wait for the client.
constexpr size_t kWriteAheadBytes = size_t{64} << 10;
constexpr ConstantHeader kAnswerHeaders[] = {
    {":status", "200"}, {"content-type", "application/grpc"}, {"grpc-accept-encoding", "identity"}};

void AddStatus(const CallEnd& end, CallMetadata& trailers) {
  trailers.Add("grpc-status", std::to_string(static_cast<int>(end.status.code())));
  if (!end.status.message().empty()) {
    trailers.Add("grpc-message", PercentEncode(end.status.message()));
  }
  for (const auto& [key, value] : end.trailers) trailers.Add(key, value);
}

}  // namespace

CallStream::CallStream(CallShare& share, Connection& connection, int32_t id, RequestHead& head,
                       std::shared_ptr<const ConnectionPeer> peer, TimePoint deadline,
                       MessageBound bound, std::shared_ptr<std::atomic<int64_t>> siblings)
    : share_(share),
      loop_(share.loop),
      connection_(&connection),
      id_(id),
      peer_(std::move(peer)),
      deadline_(deadline),
      siblings_(std::move(siblings)),
      assembler_(bound, head.encoding) {
  if (!share.spare.empty()) {
    parts_ = std::move(share.spare.back());
    share.spare.pop_back();
    output = std::move(parts_.output);
  }
  std::swap(parts_.head, head);
  share_.calls.fetch_add(1);
  siblings_->fetch_add(1);
}

CallStream::~CallStream() {
  loop_.Clear(*this);
  siblings_->fetch_sub(1);
  if (share_.spare.size() < share_.spare.capacity()) {
    parts_.head.Clear();
    parts_.headers.Clear();
    parts_.trailers.Clear();
    output.Clear();
    parts_.output = std::move(output);
    share_.spare.push_back(std::move(parts_));
  }
  share_.calls.fetch_sub(1);
  share_.calls.notify_all();
}

void CallStream::Begin(CallMethods& methods) {
  if (deadline_ != kNever) loop_.Set(*this, deadline_);
  applying_ = true;  // until there is a handler
  handler_ = methods.Begin(*this);
  applying_ = false;
  Apply();
}

template <class F>
void CallStream::Ask(const F& ask) {
  const MutexLock lock(mutex_);
  ask(asked_);
  // While a callback of this call runs, Apply continues after it. Posted under the lock, so that
  // the call cannot end in between: Apply takes the lock to read the requests.
  if (!loop_.OnThread() || !applying_) loop_.Post(*this);
}

void CallStream::Read() {
  Ask([](Asked& asked) { asked.read = true; });
}

void CallStream::Write(OutMessage message) {
  Ask([&](Asked& asked) { asked.write = std::move(message); });
}

void CallStream::AddHeader(std::string_view key, std::string_view value) {
  parts_.headers.Add(key, value);
}

void CallStream::Finish(CallEnd end) {
  Ask([&](Asked& asked) { asked.end = std::move(end); });
}

void CallStream::Cancel() {
  const MutexLock lock(mutex_);
  asked_.cancel = true;
  loop_.Post(*this);
}

bool CallStream::TakeAsked(Asked& asked) {
  const MutexLock lock(mutex_);
  asked = std::exchange(asked_, Asked());
  return asked.any();
}

void CallStream::Run() { Apply(); }

void CallStream::Apply() {
  if (applying_) return;
  applying_ = true;
  for (;;) {
    Asked asked;
    if (TakeAsked(asked)) {
      Do(asked);
    } else if (!Advance()) {
      break;
    }
  }
  applying_ = false;
  Keep(std::exchange(incoming_, {}));
  TellKept();
  if (done_ && !posted()) delete this;
}

void CallStream::Do(Asked& asked) {
  if (asked.cancel) Lose(NGHTTP2_CANCEL);
  reading_ |= asked.read;
  writing_ |= asked.write.has_value();
  ended_ |= asked.end.has_value();
  try {
    if (asked.write) Send(*asked.write);
    if (asked.end) End(*asked.end);
  } catch (const std::bad_alloc&) {
    Lose(NGHTTP2_ENHANCE_YOUR_CALM);
  }
}

void CallStream::Lose(uint32_t http2_error) {
  answered_ = true;
  cancelled_.store(true, std::memory_order_seq_cst);
  if (connection_ == nullptr || leaving_) return;
  connection_->session().Reset(id_, http2_error);
  connection_->OnOutput();
}

bool CallStream::Advance() {
  if (done_) return false;
  if (cancelled() && !told_cancelled_ && !ended_) {
    told_cancelled_ = true;
    handler_->OnCancel();
    return true;
  }
  if (writing_ && (connection_ == nullptr || output.size() <= kWriteAheadBytes)) {
    writing_ = false;
    handler_->OnWritten(connection_ != nullptr);
    return true;
  }
  if (ended_ && connection_ == nullptr) {
    done_ = true;
    handler_->OnDone();
    return true;
  }
  return reading_ && !ended_ && ReadOne();
}

bool CallStream::ReadOne() {
  const bool stored = unread_at_ < unread_.size();
  std::string_view bytes = stored ? std::string_view(unread_).substr(unread_at_) : incoming_;
  if (!cancelled() && !bytes.empty()) {
    const size_t before = bytes.size();
    InMessage message;
    bool whole = false;
    Status status;
    try {
      // A call without a connection takes nothing that has just been read.
      const bool lies = !stored && connection_ != nullptr;
      status = assembler_.Take(bytes, lies ? connection_->block() : nullptr, message, whole);
    } catch (const std::bad_alloc&) {
      status = ResourceExhausted("no memory for the message");
    }
    const size_t taken = before - bytes.size();
    if (stored) {
      unread_at_ += taken;
    } else {
      incoming_ = bytes;
    }
    if (status.ok() && !whole && assembler_.MayPlace()) {
      assembler_.Place(
          handler_->Place(assembler_.begun(), static_cast<int64_t>(assembler_.message_bytes())));
    }
    if (connection_ != nullptr) {
      connection_->session().Consume(id_, taken);
      connection_->OnMessageLength(assembler_.message_bytes(),
                                   whole ? message.places != nullptr : assembler_.placed());
      connection_->OnOutput();
    }
    if (!status.ok()) return Fail(status), true;
    if (!whole) return true;
    reading_ = false;
    message_pace_.Restart();
    handler_->OnMessage(std::move(message));
    if (unread_at_ == unread_.size()) Forget();
    return true;
  }
  if (!half_closed_ && !cancelled()) return false;
  if (!cancelled() && assembler_.under_way()) {
    Fail(InvalidArgument("the client ended the call within a message"));
    return true;
  }
  reading_ = false;
  handler_->OnHalfClose();
  return true;
}

void CallStream::Send(const OutMessage& message) {
  if (connection_ == nullptr || answered_) return;
  const auto bytes = static_cast<uint64_t>(message.bytes());
  const std::array<char, MessageAssembler::kPrefixBytes> prefix = {
      0, static_cast<char>(bytes >> 24), static_cast<char>(bytes >> 16),
      static_cast<char>(bytes >> 8), static_cast<char>(bytes)};
  output.Copy({prefix.data(), prefix.size()});
  output.Refer(message.first.bytes, message.first.owner);
  for (const OutMessage::Piece& piece : message.rest) output.Refer(piece.bytes, piece.owner);
  if (std::exchange(responded_, true)) {
    connection_->session().Resume(id_, *this);
  } else {
    connection_->session().Respond(id_, *this, parts_.headers, kAnswerHeaders);
  }
  connection_->OnOutput();
}

void CallStream::End(const CallEnd& end) {
  reading_ = false;
  incoming_ = {};
  Forget();
  assembler_.Drop();
  if (!late_ || end.status.ok()) return SendEnd(end);
  // The handler knows only that the answer is not wanted or that no message has arrived, and the
  // client may learn of the deadline first.
  SendEnd({Status(Code::kDeadlineExceeded, "the call's deadline has passed"),
           end.status.code() == Code::kCancelled ? end.trailers : CallMetadata()});
}

void CallStream::Fail(const Status& status) {
  try {
    SendEnd({status, {}});
  } catch (const std::bad_alloc&) {
    Lose(NGHTTP2_ENHANCE_YOUR_CALM);
  }
  incoming_ = {};
  Forget();
  assembler_.Drop();
  cancelled_.store(true, std::memory_order_seq_cst);
}

void CallStream::SendEnd(const CallEnd& end) {
  if (connection_ == nullptr || std::exchange(answered_, true)) return;
  loop_.Clear(*this);
  // In one block of headers, clients would take initial metadata for trailing metadata.
  if (!parts_.headers.empty() && !std::exchange(responded_, true)) {
    connection_->session().Respond(id_, *this, parts_.headers, kAnswerHeaders);
  }
  AddStatus(end, parts_.trailers);
  if (responded_) {
    connection_->session().End(id_, *this, parts_.trailers);
  } else {
    connection_->session().RespondWhole(id_, parts_.trailers, kAnswerHeaders);
  }
  connection_->OnOutput();
}

void CallStream::Keep(std::string_view bytes) {
  if (bytes.empty()) return;
  unread_.erase(0, unread_at_);
  unread_at_ = 0;
  unread_.append(bytes);
}

void CallStream::Forget() {
  // Frees the memory too: a call may stay open for long.
  std::string().swap(unread_);
  unread_at_ = 0;
}

void CallStream::TellKept() {
  if (connection_ == nullptr || leaving_) return;
  const int64_t kept = static_cast<int64_t>(unread_.size() - unread_at_) + assembler_.held_bytes();
  if (kept != told_kept_) connection_->OnKept(kept - told_kept_);
  told_kept_ = kept;
}

bool CallStream::IsStalled(bool restart, TimePoint now, Duration timeout) {
  const bool waits = waits_for_message();
  const TimePoint since =
      message_pace_.Since(came_bytes_, MessagePace::kProgressBytes, restart || !waits, now);
  return waits && now - since >= timeout;
}

void CallStream::OnData(std::string_view bytes) {
  connection_->OnMessageBytes(bytes.size());
  came_bytes_ += std::ssize(bytes);
  if (answered_ || cancelled()) return connection_->session().Consume(id_, bytes.size());
  incoming_ = bytes;
  Apply();
}

std::span<char> CallStream::Room() const {
  if (!reading_ || answered_ || cancelled() || unread_at_ < unread_.size()) return {};
  return assembler_.Room();
}

void CallStream::OnEnd() {
  half_closed_ = true;
  Apply();
}

void CallStream::OnTaken(size_t) {
  // Not here, as the session is writing a frame.
  if (writing_ && output.size() <= kWriteAheadBytes) loop_.Post(*this);
}

void CallStream::OnClose() {
  if (!trailers_sent) cancelled_.store(true, std::memory_order_seq_cst);
  loop_.Clear(*this);
  output.Clear();
  if (cancelled()) assembler_.Drop();
  Forget();  // it is read no more
  connection_->OnKept(-std::exchange(told_kept_, 0));
  leaving_ = connection_->OnStreamClosed(*this, trailers_sent);
  if (!leaving_) connection_ = nullptr;
  Apply();
}

void CallStream::OnLeft(bool arrived) {
  if (!arrived) cancelled_.store(true, std::memory_order_seq_cst);
  connection_ = nullptr;
  Apply();
}

void CallStream::OnTime() {
  late_ = true;
  cancelled_.store(true, std::memory_order_seq_cst);
  Apply();
}

}  // namespace attend
