// SPDX-License-Identifier: Apache-2.0
//
// A server in the test's own process, on generated classes: answers with the double-precision
// reference, or fails and delays as the test requests.

#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attention.grpc.pb.h"
#include "client/call/attention_call.h"

namespace attend::client {

class FakeServer final : public v1::AttentionService::Service {
 public:
  // The limit of one message; gRPC refuses more by itself, without a retry hint.
  explicit FakeServer(int receive_bytes_max = -1);
  ~FakeServer() override;

  const std::string& address() const { return address_; }
  void Stop();

  // Before each request, with its number from 0: a failure to return, or OK to proceed.
  using Before = std::function<grpc::Status(int64_t number, grpc::ServerContext* context)>;
  void SetBefore(Before before) {
    const std::lock_guard lock(mutex_);
    before_ = std::move(before);
  }
  // Spoils or completes an answer before it is sent.
  using After = std::function<void(v1::AttendResponse*)>;
  void SetAfter(After after) {
    const std::lock_guard lock(mutex_);
    after_ = std::move(after);
  }
  // On streams: answer only when this many requests are waiting, last one first. Default 1.
  void SetStreamBatch(int64_t requests) { stream_batch_ = requests; }

  // The limit that GetServerInfo returns; 0: none.
  void SetRequestBytesMax(int64_t bytes) { request_bytes_max_ = bytes; }
  void SetTenants(std::vector<std::string> names) {
    const std::lock_guard lock(mutex_);
    tenants_ = std::move(names);
  }
  // The socket that GetServerInfo returns; empty: none.
  void SetSharedMemory(const std::string& socket) {
    const std::lock_guard lock(mutex_);
    socket_ = socket;
  }
  // GetServerInfo does not answer.
  void HoldInfo() { info_held_ = true; }
  // How GetServerInfo ends.
  void SetInfo(const grpc::Status& status) {
    const std::lock_guard lock(mutex_);
    info_ = status;
  }

  int64_t calls() const { return calls_; }
  int64_t infos() const { return infos_; }
  int64_t cancelled() const { return cancelled_; }
  std::set<std::string> peers() const {
    const std::lock_guard lock(mutex_);
    return peers_;
  }
  using ChunkedStream =
      grpc::ServerReaderWriter<v1::AttendChunkedResponse, v1::AttendChunkedRequest>;
  // Called for every AttendChunked stream.
  using Chunked = std::function<grpc::Status(grpc::ServerContext* context, ChunkedStream* stream)>;
  void SetChunked(Chunked chunked) {
    const std::lock_guard lock(mutex_);
    chunked_ = std::move(chunked);
  }
  // Blocks in `before` until the client gives up; counts it as cancelled.
  grpc::Status UntilCancelled(grpc::ServerContext* context);

  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override;
  grpc::Status AttendStream(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::AttendResponse, v1::AttendRequest>* stream) override;
  grpc::Status AttendChunked(grpc::ServerContext* context, ChunkedStream* stream) override;
  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;

 private:
  grpc::Status RunBefore(int64_t number, grpc::ServerContext* context);
  void RunAfter(v1::AttendResponse* response);

  std::atomic<int64_t> stream_batch_{1};
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> infos_{0};
  std::atomic<bool> info_held_{false};
  std::atomic<int64_t> request_bytes_max_{0};
  std::atomic<int64_t> cancelled_{0};
  mutable std::mutex mutex_;
  Before before_;
  After after_;
  Chunked chunked_;
  grpc::Status info_;
  std::vector<std::string> tenants_;
  std::set<std::string> peers_;
  std::string address_, socket_;
  std::unique_ptr<grpc::Server> server_;
};

// Computes the answer to `request`, or INVALID_ARGUMENT.
Status Answer(const v1::AttendRequest& request, v1::AttendResponse* response);

}  // namespace attend::client
