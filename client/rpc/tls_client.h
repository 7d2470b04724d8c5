// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: TLS to the server. gRPC makes the connections; where it fails, it says
// little more than that. Then Diagnose makes one by itself and says in words what is wrong.

#pragma once

#include <grpcpp/security/credentials.h>
#include <openssl/ssl.h>

#include <chrono>
#include <memory>
#include <string>

#include "client/call/tls_options.h"
#include "kernels/util/status.h"

namespace attend::client {

class TlsClient {
 public:
  // Reads the files. INVALID_ARGUMENT names the option and the file. `target` is ServerTarget's.
  // Null without TLS: where no authority is named, and for Unix sockets.
  static Result<std::shared_ptr<const TlsClient>> Make(const TlsOptions& options,
                                                       const std::string& target);

  std::shared_ptr<grpc::ChannelCredentials> Credentials() const;
  const std::string& server_name() const { return options_.server_name; }
  const std::string& host() const { return host_; }  // of the target

  // Why no connection of TLS comes about, in words; empty if one does, or if nobody listens.
  std::string Diagnose(std::chrono::milliseconds timeout) const;

 private:
  struct Free {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  class Attempt;

  TlsClient(const TlsOptions& options, const std::string& target);
  Status Read();
  std::string WhyNotVerified(SSL* ssl) const;
  std::string WhyRefused(SSL* ssl) const;

  const TlsOptions options_;
  std::string host_;  // without brackets
  std::string port_;
  grpc::SslCredentialsOptions texts_;
  std::unique_ptr<SSL_CTX, Free> context_;
};

}  // namespace attend::client
