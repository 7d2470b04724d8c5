// SPDX-License-Identifier: Apache-2.0
//
// Keeps a fixed number of unary calls with prepared messages in flight, and counts. Does as little
// per call as gRPC allows, so that the server and the wire are measured.

#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/service/rounds.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

inline constexpr char kAttendMethod[] = "/attend.v1.AttentionService/Attend";
inline constexpr char kStreamMethod[] = "/attend.v1.AttentionService/AttendStream";
// The bytes of the first and then of every 16th answer are checked, of the others the length.
inline constexpr int64_t kBytesCheckedEvery = 16;

// The name in the certificates of measured servers.
inline constexpr char kTlsName[] = "localhost";

// Checks an answer, including its bytes if `bytes_too`; returns what is wrong, or "".
using Verify = std::function<std::string(const grpc::ByteBuffer& answer, bool bytes_too)>;

// A caller's request, and the check of its answer.
struct PreparedCall {
  grpc::ByteBuffer request;
  Verify verify;
};
// A caller's calls, which it makes in order and repeats. Not empty.
using Script = std::vector<std::shared_ptr<const PreparedCall>>;

// A call of `work`, which must be admitted, for a server that computes it.
std::shared_ptr<const PreparedCall> CallOf(const std::shared_ptr<const Work>& work,
                                           const std::string& request_id = "bench");
// The same for a server that answers with exactly this number of bytes.
std::shared_ptr<const PreparedCall> EchoCallOf(const std::shared_ptr<const Work>& work,
                                               int64_t answer_bytes);

using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

// Connections with separate sockets, which stay open between drives.
class Connections {
 public:
  // `authority`: the CA of the server's certificate in PEM, which must be for kTlsName; empty: no
  // TLS.
  Connections(const std::string& target, int count, const std::string& authority = "");
  Stub& stub(int index) { return *stubs_[static_cast<size_t>(index) % stubs_.size()]; }
  int count() const { return static_cast<int>(stubs_.size()); }

 private:
  std::vector<std::unique_ptr<Stub>> stubs_;
};

// Makes one call after another on the first connection; the calling thread waits for each, and
// polls for gRPC. For one thread.
class BlockingCaller {
 public:
  explicit BlockingCaller(Connections& connections) : stub_(connections.stub(0)) {}
  ~BlockingCaller();
  Result<grpc::ByteBuffer> Call(const grpc::ByteBuffer& request);

 private:
  Stub& stub_;
  grpc::CompletionQueue queue_;
};

// Runs `in_flight` callers for `seconds`, assigned to the connections and the scripts in turn. The
// first failure or wrong answer is the error.
Result<Sample> Drive(Connections& connections, const std::vector<Script>& scripts, int in_flight,
                     double seconds);

}  // namespace attend::bench
