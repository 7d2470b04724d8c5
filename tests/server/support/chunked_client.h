// SPDX-License-Identifier: Apache-2.0
//
// A client of AttendChunked on generated classes: single streams whose every message the test
// chooses, and whole requests over several streams.

#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "attend/v1/attention.grpc.pb.h"
#include "tests/server/support/test_server.h"

namespace attend::test {

// One stream on its own connection. One thread writes, one reads.
class ChunkedStreamClient {
 public:
  explicit ChunkedStreamClient(const TestServer& server,
                               std::chrono::milliseconds timeout = std::chrono::milliseconds(0),
                               const std::string& tenant = "");

  bool SendHeader(const v1::AttendRequest& header);
  bool SendToken(const std::string& token);
  bool SendChunk(int tensor, uint64_t offset, const std::string& data);
  bool Send(const v1::AttendChunkedRequest& message) { return stream_->Write(message); }
  bool HalfClose() { return stream_->WritesDone(); }
  // Reads the next message, which must exist.
  v1::AttendChunkedResponse Receive();
  bool Receive(v1::AttendChunkedResponse* message) { return stream_->Read(message); }
  // Reads the remaining messages, then the status.
  grpc::Status Finish();
  void Cancel() { context_.TryCancel(); }
  int PushbackMs() const;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttendChunkedRequest, v1::AttendChunkedResponse>>
      stream_;
};

struct Chunk {
  int tensor = 0;
  uint64_t offset = 0;
  std::string data;
};

// The request without its bytes.
v1::AttendRequest ChunkedHeader(const v1::AttendRequest& request);
// Its bytes in chunks of random sizes up to `bytes_max`, in random order.
std::vector<Chunk> CutToChunks(const v1::AttendRequest& request, int64_t bytes_max,
                               std::mt19937_64& random);

// An answer assembled from several streams. Thread-safe.
class AnswerBuilder {
 public:
  void Add(const v1::AttendChunkedResponse& message);
  // The answer as a unary call would return it. Faults, such as duplicate bytes, are written to
  // `fault`.
  v1::AttendResponse Build(std::string* fault);

 private:
  std::mutex mutex_;
  int headers_ = 0;
  v1::AttendResponse response_;
  std::vector<Chunk> chunks_;
};

// Sends `request` over several streams and waits for all of them.
struct ChunkedOutcome {
  std::vector<grpc::Status> statuses;  // of each stream, the first one first
  v1::AttendResponse response;
  std::string token;  // empty without a grant
  std::string fault;
  bool ok() const;
};
ChunkedOutcome AttendOverStreams(const TestServer& server, const v1::AttendRequest& request,
                                 int streams, int64_t chunk_bytes_max, uint64_t seed);

}  // namespace attend::test
