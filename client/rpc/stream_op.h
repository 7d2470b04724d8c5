// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the state machine of one AttendStream. gRPC holds at most one read and
// one write at a time; further requests are queued. Owns itself while gRPC holds an event.
//
//   starting --1--> open --2--> half-closed
//      |              |              |
//      +------3-------+------3-------+--> finishing --4--> closing --5--> ended
//
//   1  gRPC has started the call. From now on it holds one read, and the queue is written.
//   2  Finish was called and the queue is written: WritesDone. Answers still arrive.
//   3  gRPC could not start the call, or a read failed: the server ended the call, its connection
//      was lost, its deadline passed, or it was cancelled, here too after a malformed answer.
//      Nothing is written any more, and gRPC is asked for the call's status. (A failed write
//      changes nothing: the read then fails too.)
//   4  The status is known. New requests are refused with it.
//   5  gRPC holds no event. Unanswered requests have ended with the status.
//
// A stream that Start refuses has ended at once.

#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "client/call/call_handle.h"
#include "client/call/call_options.h"
#include "client/rpc/connections.h"
#include "client/wire/message_codec.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// Ends a request that was not sent.
void Refuse(const StreamCallback& callback, Status status);

class StreamOp final : public Operation {
 public:
  // `message_bytes_max`: the largest message that the server accepts; 0: unknown.
  StreamOp(ConnectionPool* pool, const StreamOptions& options, RequestIds* ids,
           const std::atomic<int64_t>* message_bytes_max);

  int connection() const { return connection_; }
  const std::string& server() const { return options_.server; }

  void Start();
  // Returns the request's handle, which is empty if the request was refused.
  CallHandle Send(std::shared_ptr<const EncodedCall> call, std::string_view id,
                  StreamCallback callback);
  Status Finish();
  void Cancel() override;
  // The request ends with CANCELLED. If it was sent, its entry stays in pending_ so that its answer
  // is recognised.
  void CancelRequest(const std::string& id, uint64_t serial) override;
  // Returns once no callback can run any more.
  void WaitForEnd();
  void OnEvent(int slot, bool ok) override;

 private:
  enum Slot { kStarted, kWritten, kRead, kWritesDone, kFinished, kSlots };
  struct Pending {
    StreamCallback callback;                  // null: cancelled
    std::shared_ptr<const EncodedCall> call;  // keeps its tensors' regions alive
    SharedOutputs outputs;                    // the call's
    uint64_t serial = 0;                      // unique, unlike ids
    bool sent = false;
  };

  void* Expect(Slot slot) ATTEND_REQUIRES(mutex_);
  void PumpWrites() ATTEND_REQUIRES(mutex_);
  void FinishCall() ATTEND_REQUIRES(mutex_);
  void PostCancel() ATTEND_REQUIRES(mutex_);
  void CancelCall();
  void EndRequest(const std::string& id, uint64_t serial);

  void HandleAnswer(grpc::ByteBuffer* buffer);
  SharedOutputs OutputsOf(const std::string& id);
  void EndPending();

  ConnectionPool* const pool_;
  const StreamOptions options_;
  RequestIds* const ids_;
  const std::atomic<int64_t>* const message_bytes_max_;
  Event events_[kSlots];

  Lease lease_;  // released with the last event
  const int connection_;
  CompletionLoop* const loop_;

  Mutex mutex_;
  CondVar ended_changed_;
  std::shared_ptr<Operation> self_ ATTEND_GUARDED_BY(mutex_);
  std::optional<grpc::ClientContext> context_ ATTEND_GUARDED_BY(mutex_){std::in_place};
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_ ATTEND_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_ ATTEND_GUARDED_BY(mutex_);
  std::string server_id_ ATTEND_GUARDED_BY(mutex_);  // as StreamAnswer's, once answered
  std::string server_ ATTEND_GUARDED_BY(mutex_);
  grpc::Status grpc_status_ ATTEND_GUARDED_BY(mutex_);
  std::deque<std::string> queue_ ATTEND_GUARDED_BY(mutex_);  // ids of unsent requests, in order
  std::unordered_map<std::string, Pending> pending_ ATTEND_GUARDED_BY(mutex_);
  uint64_t serials_ ATTEND_GUARDED_BY(mutex_) = 0;  // the last request's
  int expected_ ATTEND_GUARDED_BY(mutex_) = 0;      // events that gRPC holds
  bool started_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool no_more_ ATTEND_GUARDED_BY(mutex_) = false;    // Finish was called
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;  // possibly before the call began
  bool writes_done_sent_ ATTEND_GUARDED_BY(mutex_) = false;
  bool finish_sent_ ATTEND_GUARDED_BY(mutex_) = false;
  // The call's status is known; new requests are refused.
  bool closing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool ended_ ATTEND_GUARDED_BY(mutex_) = false;  // every callback has run
  // A fault found here, reported instead of the call's CANCELLED.
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Status final_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
