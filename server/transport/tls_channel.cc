// SPDX-License-Identifier: Apache-2.0
//
// OpenSSL never touches the socket itself: a custom BIO gives it records that were received in one
// system call and collects the records it produces. During the handshake the BIO reads from the
// socket directly, and only what OpenSSL asks for, so that no application data is consumed early.
// Encryption fills whole records: small pieces of output are copied together into one.
//
// Invariant: ciphertext taken from the socket is passed to OpenSSL within the same Read, so epoll
// reports everything that is left.

#include "server/transport/tls_channel.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace attend {
namespace {

// Upper bound of a record's overhead.
constexpr size_t kOverheadBytes = 256;

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

TlsChannel& ChannelOf(BIO* bio) { return *static_cast<TlsChannel*>(BIO_get_data(bio)); }

}  // namespace

TlsChannel::TlsChannel(UniqueFd socket, SSL_CTX* context, const Clock& clock)
    : Channel(std::move(socket)), ssl_(SSL_new(context)), clock_(clock) {
  BIO* const bio = ssl_ == nullptr ? nullptr : BIO_new(Method());
  if (bio == nullptr) throw std::bad_alloc();
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  SSL_set_accept_state(ssl_.get());
  SSL_set_mode(ssl_.get(), SSL_MODE_RELEASE_BUFFERS);
  SSL_set_msg_callback(ssl_.get(), OnMessage);
  SSL_set_msg_callback_arg(ssl_.get(), this);
}

BIO_METHOD* TlsChannel::Method() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "attend");
    if (made == nullptr) throw std::bad_alloc();
    BIO_meth_set_read_ex(made, ReadCiphertext);
    BIO_meth_set_write_ex(made, WriteCiphertext);
    BIO_meth_set_ctrl(made, Control);
    return made;
  }();
  return method;
}

// The socket is read only during the handshake, which asks for no byte beyond the current record.
int TlsChannel::ReadCiphertext(BIO* bio, char* to, size_t size, size_t* taken) {
  TlsChannel& self = ChannelOf(bio);
  BIO_clear_retry_flags(bio);
  if (!self.received_.empty()) {
    *taken = std::min(size, self.received_.size());
    std::memcpy(to, self.received_.data(), *taken);
    self.received_.remove_prefix(*taken);
    return 1;
  }
  *taken = 0;
  const ssize_t bytes = self.handshaking_ ? recv(self.socket(), to, size, 0) : -1;
  if (bytes > 0) *taken = static_cast<size_t>(bytes);
  self.spoke_ |= bytes > 0;
  const bool later = bytes < 0 && (!self.handshaking_ || WouldBlock());
  if (later) BIO_set_retry_read(bio);
  self.peer_closed_ = bytes <= 0 && !later;
  return bytes > 0 ? 1 : 0;
}

int TlsChannel::WriteCiphertext(BIO* bio, const char* from, size_t size, size_t* given) try {
  TlsChannel& self = ChannelOf(bio);
  BIO_clear_retry_flags(bio);
  if (self.unsent_.empty() && self.records_.size() - self.records_bytes_ >= size) {
    std::memcpy(self.records_.data() + self.records_bytes_, from, size);
    self.records_bytes_ += size;
  } else {
    self.unsent_.append(from, size);
  }
  *given = size;
  return 1;
} catch (const std::bad_alloc&) {
  *given = 0;
  return 0;
}

long TlsChannel::Control(BIO* /*bio*/, int command, long /*number*/,  // NOLINT: OpenSSL's types
                         void* /*pointer*/) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

// Bounds rekeying, and renegotiation attempts, each of which is refused with an alert.
void TlsChannel::OnMessage(int is_write, int /*version*/, int type, const void* /*bytes*/,
                           size_t /*size*/, SSL* /*ssl*/, void* own) {
  const bool counts = is_write != 0 ? type == SSL3_RT_ALERT : type == SSL3_RT_HANDSHAKE;
  if (!counts) return;
  auto* const self = static_cast<TlsChannel*>(own);
  const TimePoint now = self->clock_.Now();
  if (self->handshake_messages_.Wait(now) > Duration::zero()) self->too_many_messages_ = true;
  self->handshake_messages_.Charge(1, now);
}

void TlsChannel::SetWrong() {
  const long verified = SSL_get_verify_result(ssl_.get());  // NOLINT(google-runtime-int): OpenSSL's
  const char* const reason = ERR_reason_error_string(ERR_peek_error());
  if (verified != X509_V_OK) {
    wrong_ = X509_verify_cert_error_string(verified);
  } else {
    wrong_ = reason == nullptr ? "TLS failed" : reason;
  }
}

TlsChannel::Step TlsChannel::Handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  const int error = SSL_get_error(ssl_.get(), result);
  if (peer_closed_) return Step::kFailed;
  if (result != 1 && error != SSL_ERROR_WANT_READ) SetWrong();
  if (too_many_messages_) wrong_ = "too many TLS handshake messages";
  if (!wrong_.empty()) return Step::kFailed;
  const bool sent = SendUnsent();
  if (result == 1) {
    handshaking_ = false;
    return Step::kDone;
  }
  return sent ? Step::kWantsRead : Step::kWantsWrite;
}

ssize_t TlsChannel::Read(std::span<char> buffer, std::span<char> scratch) {
  if (!IsTrusted()) {
    errno = ECONNABORTED;
    return -1;
  }
  const size_t most = std::min(scratch.size(), buffer.size() - 2 * kRecordBytes);
  const ssize_t bytes = recv(socket(), scratch.data(), most, 0);
  if (bytes <= 0) return bytes;
  received_ = {scratch.data(), static_cast<size_t>(bytes)};
  size_t got = 0;
  int error = SSL_ERROR_NONE;
  // Asking for a record that is not there would cost as much as a small one.
  while (error == SSL_ERROR_NONE && (!received_.empty() || SSL_has_pending(ssl_.get()) == 1)) {
    ERR_clear_error();
    size_t more = 0;
    const int result = SSL_read_ex(ssl_.get(), buffer.data() + got, buffer.size() - got, &more);
    got += more;
    if (result != 1) error = SSL_get_error(ssl_.get(), result);
  }
  received_ = {};
  ended_ = error == SSL_ERROR_ZERO_RETURN;
  failed_ = error != SSL_ERROR_NONE && error != SSL_ERROR_WANT_READ && !ended_;
  if (failed_) SetWrong();
  SendUnsent();  // a reply to a key update, or an alert
  if (too_many_messages_) wrong_ = "too many TLS handshake messages";
  if (!wrong_.empty()) {
    errno = EPROTO;
    return -1;
  }
  if (got > 0 || ended_) return static_cast<ssize_t>(got);
  errno = EAGAIN;
  return -1;
}

bool TlsChannel::SendUnsent() {
  while (unsent_begin_ < unsent_.size()) {
    const ssize_t bytes = send(socket(), unsent_.data() + unsent_begin_,
                               unsent_.size() - unsent_begin_, MSG_NOSIGNAL);
    if (bytes < 0) return false;
    unsent_begin_ += static_cast<size_t>(bytes);
  }
  if (!unsent_.empty()) unsent_ = std::string();
  unsent_begin_ = 0;
  return true;
}

ssize_t TlsChannel::Write(const OutputQueue& output, std::span<char> scratch) {
  if (!SendUnsent()) return -1;
  if (encrypted_bytes_ == 0 && !output.empty() && !EncryptAndSend(output, scratch)) return -1;
  return static_cast<ssize_t>(std::exchange(encrypted_bytes_, 0));
}

bool TlsChannel::EncryptAndSend(const OutputQueue& output, std::span<char> scratch) try {
  const bool encrypted = Encrypt(output, scratch);
  const std::string_view records(records_.data(), std::exchange(records_bytes_, 0));
  records_ = {};
  if (!encrypted) {
    errno = EPROTO;
    return false;
  }
  const ssize_t bytes = send(socket(), records.data(), records.size(), MSG_NOSIGNAL);
  if (bytes == static_cast<ssize_t>(records.size())) return true;
  if (bytes < 0 && !WouldBlock()) return false;
  unsent_.insert(0, records.substr(bytes < 0 ? 0 : static_cast<size_t>(bytes)));
  errno = EAGAIN;
  return false;
} catch (const std::bad_alloc&) {
  errno = ENOMEM;
  return false;
}

bool TlsChannel::Encrypt(const OutputQueue& output, std::span<char> scratch) {
  // Pieces smaller than a record share one.
  const std::span<char> shared = scratch.last(kRecordBytes);
  size_t shared_bytes = 0;
  records_ = scratch.first(scratch.size() - kRecordBytes);
  std::array<iovec, 64> pieces;
  const size_t count = output.Fill(pieces);
  // Reserves space for the shared record and for one more.
  const auto full = [&] {
    return records_.size() - records_bytes_ < 2 * (kRecordBytes + kOverheadBytes);
  };
  for (size_t i = 0; i < count && !full(); ++i) {
    std::string_view piece(static_cast<const char*>(pieces[i].iov_base), pieces[i].iov_len);
    while (!piece.empty() && !full()) {
      const size_t bytes = std::min(piece.size(), kRecordBytes - shared_bytes);
      const std::string_view part = piece.substr(0, bytes);
      piece.remove_prefix(bytes);
      encrypted_bytes_ += bytes;
      if (bytes == kRecordBytes) {
        if (!EncryptRecord(part)) return false;
        continue;
      }
      std::memcpy(shared.data() + shared_bytes, part.data(), bytes);
      shared_bytes += bytes;
      if (shared_bytes < kRecordBytes) continue;
      if (!EncryptRecord({shared.data(), std::exchange(shared_bytes, 0)})) return false;
    }
  }
  return shared_bytes == 0 || EncryptRecord({shared.data(), shared_bytes});
}

bool TlsChannel::EncryptRecord(std::string_view plain) {
  ERR_clear_error();
  size_t written = 0;
  // The BIO accepts everything, so a record is never written in part.
  return SSL_write_ex(ssl_.get(), plain.data(), plain.size(), &written) == 1;
}

void TlsChannel::End() {
  ERR_clear_error();
  if (!handshaking_ && !failed_) SSL_shutdown(ssl_.get());
  ERR_clear_error();
  SendUnsent();
  if (!handshaking_) return;
  // With unread bytes the kernel would reset the connection, and the client would lose the alert.
  std::array<char, 4096> unread;
  for (int i = 0; i < 16 && recv(socket(), unread.data(), unread.size(), 0) > 0; ++i) {
  }
}

}  // namespace attend
