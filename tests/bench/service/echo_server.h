// SPDX-License-Identifier: Apache-2.0
//
// The bare gRPC server that the service is measured against: byte buffers dropped as they come and
// answered with as many bytes as attend answers. Same method, same callback API, same process
// settings. Every other method is answered with an empty message: it is a collector of spans, too.
//
// An inline one is the fastest that gRPC's callbacks allow: gRPC ends a call on the thread that
// read it, and messages of AttendStream are answered one by one, under their ids.

#pragma once

#include <grpcpp/security/server_credentials.h>

#include <cstdint>
#include <memory>
#include <string>

namespace attend::bench {

enum class EchoKind { kPlain, kInline };

// Serves until it is destroyed.
class EchoServer {
 public:
  // `listen` is HOST:PORT or unix:PATH, `answer_bytes` the length of every answer.
  EchoServer(
      const std::string& listen, int64_t answer_bytes, EchoKind kind = EchoKind::kPlain,
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials());
  ~EchoServer();
  // With the port that was bound; empty if it does not serve.
  const std::string& address() const { return address_; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::string address_;
};

}  // namespace attend::bench
