// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: TLS to the server. gRPC makes the connections but hardly says why one
// fails. Diagnose therefore makes a connection of its own and returns the reason in words.

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
  // Null without TLS: no `ca`, or a Unix socket.
  static Result<std::shared_ptr<const TlsClient>> Make(const TlsOptions& options,
                                                       const std::string& target);

  std::shared_ptr<grpc::ChannelCredentials> Credentials() const;
  const std::string& server_name() const { return options_.server_name; }
  const std::string& host() const { return host_; }  // of the target

  // Why a TLS connection fails, in words; empty if it succeeds, or if no process listens.
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
