// SPDX-License-Identifier: Apache-2.0
//
// Bytes are received until the request is complete, answered once, and sent; while out_ is not
// empty, nothing is received, so a client cannot make the buffers grow. Buffers that held a request
// are wiped: it may carry a token.

#include "server/http/http_connection.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <utility>

#include "server/util/wipe.h"

namespace attend {
namespace {

constexpr size_t kReadBytes = 2048;

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

HttpConnection::HttpConnection(UniqueFd socket, std::unique_ptr<SSL, FreeSsl> ssl, bool local,
                               TimePoint since)
    : socket_(std::move(socket)), ssl_(std::move(ssl)), local_(local), since_(since) {
  // Reserved once, because growing would leave copies of credentials in freed memory.
  request_.reserve(kHttpRequestBytesMax + kReadBytes);
  if (ssl_ == nullptr) return;
  // TLS uses memory BIOs, so that the socket is accessed in one way only, without SIGPIPE.
  SSL_set_bio(ssl_.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
}

short HttpConnection::events() const { return out_.empty() ? POLLIN : POLLOUT; }

bool HttpConnection::Serve(const Answer& answer) {
  if (out_.empty() && !Receive(answer)) return false;
  return out_.empty() || Send();
}

bool HttpConnection::Receive(const Answer& answer) {
  std::array<char, kReadBytes> bytes;
  const ssize_t got = recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (got < 0) return WouldBlock();
  if (got == 0) return false;
  const std::string_view received(bytes.data(), static_cast<size_t>(got));
  bool open = true;
  if (ssl_ == nullptr) {
    request_ += received;
  } else {
    open = Decrypt(received);
  }
  explicit_bzero(bytes.data(), received.size());
  if (!open) return false;
  if (!ending_) Reply(answer);
  return true;
}

bool HttpConnection::Decrypt(std::string_view bytes) {
  if (SSL_in_before(ssl_.get()) && std::isalpha(static_cast<unsigned char>(bytes.front())) != 0) {
    ssl_.reset();  // no TLS record begins with a letter, every HTTP request does
    Finish(FormatHttpAnswer({.status = "400 Bad Request", .body = "this address requires https\n"},
                            true));
    return true;
  }
  ERR_clear_error();
  // A memory BIO accepts all bytes.
  BIO_write(SSL_get_rbio(ssl_.get()), bytes.data(), static_cast<int>(bytes.size()));
  std::array<char, kReadBytes> plain;
  int got = 0;
  while ((got = SSL_read(ssl_.get(), plain.data(), static_cast<int>(plain.size()))) > 0) {
    request_.append(plain.data(), static_cast<size_t>(got));
    explicit_bzero(plain.data(), static_cast<size_t>(got));
  }
  const bool more = SSL_get_error(ssl_.get(), got) == SSL_ERROR_WANT_READ;
  TakeRecords();  // possibly an alert with the reason
  if (more) return true;
  ending_ = true;
  return !out_.empty();
}

void HttpConnection::TakeRecords() {
  char* records = nullptr;
  BIO* const written = SSL_get_wbio(ssl_.get());
  const long size = BIO_get_mem_data(written, &records);
  if (size > 0) out_.append(records, static_cast<size_t>(size));
  (void)BIO_reset(written);
}

void HttpConnection::Reply(const Answer& answer) {
  if (IsWholeHttpRequest(request_)) {
    HttpRequest request = ParseHttpRequest(request_);
    request.local = local_;
    Finish(FormatHttpAnswer(answer(request), request.method != "HEAD"));
    Wipe(request_);  // it may contain a token
  } else if (request_.size() > kHttpRequestBytesMax) {
    Finish(FormatHttpAnswer({.status = "431 Request Header Fields Too Large"}, true));
  }
}

void HttpConnection::Finish(std::string_view bytes) {
  ending_ = true;
  if (ssl_ == nullptr) {
    out_ += bytes;
    return;
  }
  SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size()));
  SSL_shutdown(ssl_.get());
  TakeRecords();
}

bool HttpConnection::Send() {
  const ssize_t sent = send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
  if (sent < 0) return WouldBlock();
  sent_ += static_cast<size_t>(sent);
  if (sent_ < out_.size()) return true;
  out_.clear();
  sent_ = 0;
  return !ending_;
}

}  // namespace attend
