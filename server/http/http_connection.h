// SPDX-License-Identifier: Apache-2.0
//
// One connection, plain or with TLS, and the one request on it. Its socket does not block; what it
// holds is bounded. One thread.

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

  // `ssl` null: without TLS. `local`: the client is on this host.
  HttpConnection(UniqueFd socket, std::unique_ptr<SSL, FreeSsl> ssl, bool local, TimePoint since);

  int socket() const { return socket_.get(); }
  TimePoint since() const { return since_; }
  // What to poll the socket for.
  short events() const;
  // Goes on as far as the socket allows. False if the connection is over.
  bool Serve(const Answer& answer);

 private:
  // False if there is nothing more to read.
  bool Receive(const Answer& answer);
  bool Send();
  // Takes bytes off the socket into request_, and what TLS itself has to say into out_.
  bool Decrypt(std::string_view bytes);
  void Reply(const Answer& answer);
  void Finish(std::string_view bytes);
  void TakeRecords();

  UniqueFd socket_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
  bool local_;
  TimePoint since_;
  std::string request_;
  std::string out_;      // for the socket
  size_t sent_ = 0;      // of out_
  bool ending_ = false;  // once out_ is sent
};

}  // namespace attend
