// SPDX-License-Identifier: Apache-2.0
//
// What the service is measured against: gRPC servers that answer Attend without attention. Same
// method, same callback API, same process settings.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace attend::bench {

enum class EchoKind {
  kSameBytes,  // byte buffers: the message itself goes back, untouched and uncopied
  kSameSizes,  // byte buffers: the message is dropped, an answer as long as attend's goes back
  kGenerated,  // generated code: parses the message, answers with a tensor of attend's size
};

const char* EchoName(EchoKind kind);

// Serves until it is destroyed.
class EchoServer {
 public:
  // `answer_bytes` is the length of the tensor that kSameSizes and kGenerated answer with.
  EchoServer(EchoKind kind, int64_t answer_bytes);
  ~EchoServer();
  int port() const { return port_; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  int port_ = 0;
};

}  // namespace attend::bench
