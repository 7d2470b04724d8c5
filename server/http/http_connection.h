// SPDX-License-Identifier: Apache-2.0
//
// One connection, plaintext or TLS, and its single request. The socket is non-blocking; buffers are
// bounded. One thread.

#pragma once

#include <openssl/ssl.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/util/clock.h"
#include "server/http/http_message.h"
#include "server/util/unique_fd.h"

namespace attend {

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};

class HttpConnection {
 public:
  using Answer = std::function<HttpAnswer(const HttpRequest&)>;

  // `ssl` null: plaintext. `local`: the client is on this host.
  HttpConnection(UniqueFd socket, std::unique_ptr<SSL, FreeSsl> ssl, bool local, TimePoint since);

  int socket() const { return socket_.get(); }
  TimePoint since() const { return since_; }
  // The events to poll the socket for.
  short events() const;
  // Continues as far as the socket allows. False if the connection is finished.
  bool Serve(const Answer& answer);

 private:
  // False if the connection is finished.
  bool Receive(const Answer& answer);
  bool Send();
  // Decrypts received bytes into request_, and puts TLS's own replies into out_.
  bool Decrypt(std::string_view bytes);
  void Reply(const Answer& answer);
  void Finish(std::string_view bytes);
  void TakeRecords();

  UniqueFd socket_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
  bool local_;
  TimePoint since_;
  std::string request_;
  std::string out_;      // to be sent
  size_t sent_ = 0;      // bytes of out_ sent
  bool ending_ = false;  // close once out_ is sent
};

}  // namespace attend
