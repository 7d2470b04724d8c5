// SPDX-License-Identifier: Apache-2.0
//
// TLS on a socket, with OpenSSL. The handshake reads from the socket only what it needs, so that no
// application data is taken before a connection reads it. After that one system call receives or
// sends many records.

#pragma once

#include <openssl/ssl.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/limits/token_bucket.h"
#include "server/transport/channel.h"

namespace attend {

class TlsChannel final : public Channel {
 public:
  // Bounds handshake messages, those after the first handshake included (key updates and the like),
  // and alerts, such as refusals of renegotiation.
  static constexpr Rate kHandshakeMessages{.per_second = 1, .burst = 32};
  // Maximum payload of a record.
  static constexpr size_t kRecordBytes = size_t{16} << 10;
  // Minimum buffer size for Read and Write.
  static constexpr size_t kBufferBytesMin = 4 * kRecordBytes;

  // `context` must be a server's. May throw std::bad_alloc. `clock` must outlive the channel.
  TlsChannel(UniqueFd socket, SSL_CTX* context, const Clock& clock);

  enum class Step { kDone, kWantsRead, kWantsWrite, kFailed };
  // Continues the handshake, which may take a millisecond of CPU time. kWantsRead, kWantsWrite:
  // call again once the socket is readable or writable. kFailed: the client has gone, or End will
  // tell it what wrong() says.
  Step Handshake();
  const SSL* ssl() const { return ssl_.get(); }
  // Whether the handshake has read anything.
  bool spoke() const { return spoke_; }

  // Whether the client's certificate is still trusted. Also asked before each read.
  void SetTrustCheck(std::function<bool()> is_trusted) { is_trusted_ = std::move(is_trusted); }

  ssize_t Read(std::span<char> buffer, std::span<char> scratch) override;
  ssize_t Write(const OutputQueue& output, std::span<char> scratch) override;
  bool IsTrusted() override { return !is_trusted_ || is_trusted_(); }
  void End() override;
  bool wants_write() const override { return !unsent_.empty(); }
  bool ended() const override { return ended_; }
  // The handshake has exceeded its time limit.
  void TimeOut() { wrong_ = "the handshake took too long (--handshake-timeout)"; }

 private:
  struct Free {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };
  static BIO_METHOD* Method();
  static int ReadCiphertext(BIO* bio, char* to, size_t size, size_t* taken);
  static int WriteCiphertext(BIO* bio, const char* from, size_t size, size_t* given);
  static long Control(BIO* bio, int command, long number, void* pointer);
  static void OnMessage(int is_write, int version, int type, const void* bytes, size_t size,
                        SSL* ssl, void* own);

  // Sends `unsent_`. False: not all of it, see errno.
  bool SendUnsent();
  // Encrypts as much of the front of `output` as fits `scratch`, and sends it.
  bool EncryptAndSend(const OutputQueue& output, std::span<char> scratch);
  bool Encrypt(const OutputQueue& output, std::span<char> scratch);
  bool EncryptRecord(std::string_view plaintext);
  void SetWrong();

  const std::unique_ptr<SSL, Free> ssl_;
  const Clock& clock_;
  TokenBucket handshake_messages_{kHandshakeMessages};
  bool too_many_messages_ = false;
  bool handshaking_ = true;
  bool spoke_ = false;
  bool peer_closed_ = false;  // during the handshake
  bool ended_ = false;        // the client has announced that it sends no more
  bool failed_ = false;       // OpenSSL may not be called any more
  std::function<bool()> is_trusted_;
  // Received records; empty while handshaking_, when they stay in the socket.
  std::string_view received_;
  std::span<char> records_;     // room for new records; overflow goes to unsent_
  size_t records_bytes_ = 0;    // how much of it is used
  std::string unsent_;          // records that the socket has not accepted
  size_t unsent_begin_ = 0;     // offset of its first unsent byte
  size_t encrypted_bytes_ = 0;  // bytes at the front of the output whose records are in unsent_
};

}  // namespace attend
