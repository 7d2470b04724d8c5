// SPDX-License-Identifier: Apache-2.0
//
// TLS by OpenSSL on a socket. The handshake asks the socket for each piece of it, so that nothing
// of what follows is taken from the socket before a connection reads it. From then on one system
// call takes or sends many records.

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
  // Messages of handshakes: those of the first, and requests for new keys and the like after it;
  // and alerts, such as those that refuse a client another handshake.
  static constexpr Rate kHandshakeMessages{.per_second = 1, .burst = 32};
  // The most that one record holds.
  static constexpr size_t kRecordBytes = size_t{16} << 10;
  // Read and Write need buffers of at least this size.
  static constexpr size_t kBufferBytesMin = 4 * kRecordBytes;

  // `context` is that of a server. May throw std::bad_alloc. `clock` must outlive it.
  TlsChannel(UniqueFd socket, SSL_CTX* context, const Clock& clock);

  enum class Step { kDone, kWantsRead, kWantsWrite, kFailed };
  // Goes on with the handshake, which may take a millisecond of processor time. kWantsRead,
  // kWantsWrite: call it again once the socket can be read, or written. kFailed: the client has
  // gone, or End tells it what wrong() says.
  Step Handshake();
  const SSL* ssl() const { return ssl_.get(); }

  // Called before each read, once the handshake is done: whether the client's certificate is still
  // trusted. If not, the connection is over.
  void SetTrustCheck(std::function<bool()> is_trusted) { is_trusted_ = std::move(is_trusted); }

  ssize_t Read(std::span<char> buffer, std::span<char> scratch) override;
  ssize_t Write(const OutputQueue& output, std::span<char> scratch) override;
  void End() override;
  bool wants_write() const override { return !unsent_.empty(); }
  bool ended() const override { return ended_; }
  // The handshake has failed because its time is over.
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

  // Sends `unsent_`. False: errno says why not all of it.
  bool SendUnsent();
  // Encrypts from the front of `output` as much as fits `scratch`, and sends it.
  bool EncryptAndSend(const OutputQueue& output, std::span<char> scratch);
  bool Encrypt(const OutputQueue& output, std::span<char> scratch);
  bool EncryptRecord(std::string_view plaintext);
  void SetWrong();

  const std::unique_ptr<SSL, Free> ssl_;
  const Clock& clock_;
  TokenBucket handshake_messages_{kHandshakeMessages};
  bool too_many_messages_ = false;
  bool handshaking_ = true;
  bool peer_closed_ = false;  // in the handshake
  bool ended_ = false;        // the client has said that it sends no more
  bool failed_ = false;       // OpenSSL takes no more calls
  std::function<bool()> is_trusted_;
  std::string_view received_;   // records from the socket; while handshaking_, they stay there
  std::span<char> records_;     // room for new records; what does not fit goes to unsent_
  size_t records_bytes_ = 0;    // used of it
  std::string unsent_;          // records that the socket has not taken
  size_t unsent_begin_ = 0;     // the first byte of it that has not been sent
  size_t encrypted_bytes_ = 0;  // at the front of the output, whose records are in unsent_
};

}  // namespace attend
