// SPDX-License-Identifier: Apache-2.0
//
// Drives unary calls with ready-made bytes from a fixed number of calls in flight, and counts. Does
// as little per call as gRPC allows, so that what is measured is the server and the wire.

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
// Of so many answers one has its bytes looked at, the first one included; of the others the length.
inline constexpr int64_t kBytesCheckedEvery = 16;

// For whom the certificates of measured servers are.
inline constexpr char kTlsName[] = "localhost";

// Looks at an answer, and at its bytes if `bytes_too`; an empty string means it is right.
using Verify = std::function<std::string(const grpc::ByteBuffer& answer, bool bytes_too)>;

// What one caller sends, and how it judges the answer.
struct PreparedCall {
  grpc::ByteBuffer request;
  Verify verify;
};
// One caller's calls, one after another and from the front again. Not empty.
using Script = std::vector<std::shared_ptr<const PreparedCall>>;

// `work`, admitted, against a server that computes it.
std::shared_ptr<const PreparedCall> CallOf(const std::shared_ptr<const Work>& work,
                                           const std::string& request_id = "bench");
// Against one that answers with exactly this many bytes.
std::shared_ptr<const PreparedCall> EchoCallOf(const std::shared_ptr<const Work>& work,
                                               int64_t answer_bytes);

using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

// Connections of their own sockets, which stay open between drives.
class Connections {
 public:
  // `authority`: of the server's certificate, in PEM, which must be for kTlsName; empty: no TLS.
  Connections(const std::string& target, int count, const std::string& authority = "");
  Stub& stub(int index) { return *stubs_[static_cast<size_t>(index) % stubs_.size()]; }
  int count() const { return static_cast<int>(stubs_.size()); }

 private:
  std::vector<std::unique_ptr<Stub>> stubs_;
};

// One call after another on the first connection; the calling thread waits for each, and does
// gRPC's polling itself. For one thread.
class BlockingCaller {
 public:
  explicit BlockingCaller(Connections& connections) : stub_(connections.stub(0)) {}
  ~BlockingCaller();
  Result<grpc::ByteBuffer> Call(const grpc::ByteBuffer& request);

 private:
  Stub& stub_;
  grpc::CompletionQueue queue_;
};

// `in_flight` callers in turn over the connections and the scripts, for `seconds`. The first call
// that fails or is answered wrongly is the error.
Result<Sample> Drive(Connections& connections, const std::vector<Script>& scripts, int in_flight,
                     double seconds);

}  // namespace attend::bench
