// SPDX-License-Identifier: Apache-2.0
//
// The bare gRPC server that the service is compared with: discards messages and answers with as
// many bytes as attend, with the same method, callback API and process settings. Other methods get
// an empty message, so that it can serve as a collector of spans.
//
// An inline echo is the fastest that gRPC's callbacks allow: gRPC ends a call on the thread that
// read it, and messages of AttendStream are answered one by one with their ids.

#pragma once

#include <grpcpp/security/server_credentials.h>

#include <cstdint>
#include <memory>
#include <string>

namespace attend::bench {

enum class EchoKind { kPlain, kInline };

// Serves until destroyed.
class EchoServer {
 public:
  // `listen` is HOST:PORT or unix:PATH. `answer_bytes` is the length of every answer.
  EchoServer(
      const std::string& listen, int64_t answer_bytes, EchoKind kind = EchoKind::kPlain,
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials());
  ~EchoServer();
  // Includes the bound port; empty if the server did not start.
  const std::string& address() const { return address_; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::string address_;
};

}  // namespace attend::bench
