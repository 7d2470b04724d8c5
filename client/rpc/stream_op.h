// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the state machine of one AttendStream. At most one read and one write are
// with gRPC at a time; requests queue for the write. Keeps itself alive while gRPC holds an event.
//
//   starting --1--> open --2--> half-closed
//      |              |              |
//      +------3-------+------3-------+--> finishing --4--> closing --5--> ended
//
//   1  gRPC has started the call. From now on one read is with it, and what is queued is written.
//   2  Finish was called, and all that was queued is written: WritesDone. Answers still come.
//   3  gRPC could not start the call, or a read failed: the server ended the call, its connection
//      was lost, its deadline passed, or it was cancelled, as it is here where an answer makes no
//      sense. Nothing is written any more, and gRPC is asked for the call's status. (A write that
//      fails changes nothing: the read then fails too.)
//   4  The status is there. New requests are refused with it.
//   5  gRPC holds no event. Requests without an answer have got the status.
//
// A stream that Start refuses is ended at once.

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
  // `message_bytes_max`: what the server takes in one message; 0 while that is unknown.
  StreamOp(ConnectionPool* pool, const StreamOptions& options, RequestIds* ids,
           const std::atomic<int64_t>* message_bytes_max);

  int connection() const { return connection_; }
  const std::string& server() const { return options_.server; }

  void Start();
  // Returns the request's handle, which does nothing if the request was refused.
  CallHandle Send(std::shared_ptr<const EncodedCall> call, std::string_view id,
                  StreamCallback callback);
  Status Finish();
  void Cancel() override;
  // It ends with CANCELLED. One that was sent stays in pending_, so that its answer is known.
  void CancelRequest(const std::string& id, uint64_t serial) override;
  // Until no callback can come any more.
  void WaitForEnd();
  void OnEvent(int slot, bool ok) override;

 private:
  enum Slot { kStarted, kWritten, kRead, kWritesDone, kFinished, kSlots };
  struct Pending {
    StreamCallback callback;                  // null: cancelled
    std::shared_ptr<const EncodedCall> call;  // keeps the regions of its tensors alive
    SharedOutputs outputs;                    // the call's
    uint64_t serial = 0;                      // ids may be used again, these are not
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

  Lease lease_;  // given back with the last event
  const int connection_;
  CompletionLoop* const loop_;

  Mutex mutex_;
  CondVar ended_changed_;
  std::shared_ptr<Operation> self_ ATTEND_GUARDED_BY(mutex_);
  std::optional<grpc::ClientContext> context_ ATTEND_GUARDED_BY(mutex_){std::in_place};
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_ ATTEND_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_ ATTEND_GUARDED_BY(mutex_);
  std::string server_id_ ATTEND_GUARDED_BY(mutex_);  // as StreamAnswer's, from the first on
  std::string server_ ATTEND_GUARDED_BY(mutex_);
  grpc::Status grpc_status_ ATTEND_GUARDED_BY(mutex_);
  std::deque<std::string> queue_ ATTEND_GUARDED_BY(mutex_);  // ids of those that wait to be sent
  std::unordered_map<std::string, Pending> pending_ ATTEND_GUARDED_BY(mutex_);
  uint64_t serials_ ATTEND_GUARDED_BY(mutex_) = 0;  // the last request's
  int expected_ ATTEND_GUARDED_BY(mutex_) = 0;      // events that gRPC still holds
  bool started_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool no_more_ ATTEND_GUARDED_BY(mutex_) = false;    // Finish was called
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;  // maybe before the call began
  bool writes_done_sent_ ATTEND_GUARDED_BY(mutex_) = false;
  bool finish_sent_ ATTEND_GUARDED_BY(mutex_) = false;
  // The call's status is known; new requests are refused.
  bool closing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool ended_ ATTEND_GUARDED_BY(mutex_) = false;  // every callback has run
  // A fault found here, told instead of the call's CANCELLED.
  Status failure_ ATTEND_GUARDED_BY(mutex_);
  Status final_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
