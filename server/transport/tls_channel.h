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

  enum class Step { kDone, kReads, kWrites, kFailed };
  // Goes on with the handshake, which may take a millisecond of processor time. kReads, kWrites:
  // call it again once the socket can be read, or written. kFailed: the client has gone, or End
  // tells it what wrong() says.
  Step Handshake();
  const SSL* ssl() const { return ssl_.get(); }

  // Asked before each read, once the handshake is done: whether the client may go on. If not, the
  // connection is over.
  void SetMayGoOn(std::function<bool()> may_go_on) { may_go_on_ = std::move(may_go_on); }

  ssize_t Read(std::span<char> buffer, std::span<char> scratch) override;
  ssize_t Write(const OutputQueue& output, std::span<char> scratch) override;
  void End() override;
  bool ended() const override { return ended_; }
  // The client had its time for the handshake.
  void GiveUp() { wrong_ = "the handshake took too long (--handshake-timeout)"; }

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

  // Sends what waits. False: errno says why not all of it.
  bool SendWaiting();
  // Encrypts from the front of `output` as much as fits `scratch`, and sends it.
  bool SealAndSend(const OutputQueue& output, std::span<char> scratch);
  bool Seal(const OutputQueue& output, std::span<char> scratch);
  bool SealRecord(std::string_view plain);
  void SetWrong();

  const std::unique_ptr<SSL, Free> ssl_;
  const Clock& clock_;
  TokenBucket handshake_messages_{kHandshakeMessages};
  bool too_many_messages_ = false;
  bool handshaking_ = true;
  bool gone_ = false;    // the client, in the handshake
  bool ended_ = false;   // the client has said that it sends no more
  bool failed_ = false;  // OpenSSL takes no more calls
  std::function<bool()> may_go_on_;
  std::string_view came_;  // records off the socket; empty, and handshaking_: the socket is asked
  std::span<char> room_;   // for records, before they go to waiting_
  size_t sealed_ = 0;      // bytes of records at the beginning of room_
  std::string waiting_;    // records that the socket has not taken
  size_t sent_ = 0;        // of them
  size_t plain_ = 0;       // bytes at the front of the output whose records wait
};

}  // namespace attend
