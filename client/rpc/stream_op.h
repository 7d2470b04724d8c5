// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the state machine of one AttendStream. At most one read and one write are
// with gRPC at a time; requests queue for the write. Keeps itself alive while gRPC holds an event.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "client/call/call_options.h"
#include "client/rpc/connections.h"
#include "client/wire/message_codec.h"

namespace attend::client {

// Ends a request that was not sent.
void Refuse(const StreamCallback& callback, Status status);

class StreamOp final : public Operation, public std::enable_shared_from_this<StreamOp> {
 public:
  // `message_bytes_max`: what the server takes in one message; 0 while that is unknown.
  StreamOp(ConnectionPool* pool, int connection, const StreamOptions& options, RequestIds* ids,
           const std::atomic<int64_t>* message_bytes_max);

  void Start();
  void Send(std::shared_ptr<const EncodedCall> call, std::string_view id, StreamCallback callback);
  Status Finish();
  void Cancel() override;
  // Until no callback can come any more.
  void WaitForEnd();
  void OnEvent(int slot, bool ok) override;

 private:
  enum Slot { kStarted, kWritten, kRead, kWritesDone, kFinished, kSlots };
  struct Queued {
    std::shared_ptr<const EncodedCall> call;
    std::string id;
  };
  struct Pending {
    StreamCallback callback;
    std::shared_ptr<const EncodedCall> call;  // keeps the regions that its tensors lie in
  };

  // These with mutex_ held.
  void* Expect(Slot slot);
  void PumpWrites();
  void FinishCall();

  void HandleAnswer(grpc::ByteBuffer* buffer);
  SharedOutputs OutputsOf(const std::string& id);
  void EndPending();

  ConnectionPool* const pool_;
  const int connection_;
  const StreamOptions options_;
  RequestIds* const ids_;
  const std::atomic<int64_t>* const message_bytes_max_;
  std::shared_ptr<StreamOp> self_;
  Event events_[kSlots];

  std::mutex mutex_;
  std::condition_variable ended_changed_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::ByteBuffer read_;
  grpc::Status grpc_status_;
  std::deque<Queued> queue_;
  std::unordered_map<std::string, Pending> pending_;
  int expected_ = 0;  // events that gRPC still holds
  bool started_ = false;
  bool writing_ = false;
  bool no_more_ = false;  // Finish was called
  bool writes_done_sent_ = false;
  bool finish_sent_ = false;
  bool closing_ = false;  // the call's status is known; new requests are refused
  bool ended_ = false;    // every callback has run
  Status failure_;        // a fault found here, told instead of the call's CANCELLED
  Status final_;
};

}  // namespace attend::client
