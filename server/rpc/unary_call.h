// SPDX-License-Identifier: Apache-2.0
//
// A unary call with one attention problem.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/rpc/h2_wire.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

// Deleted when both the transport and the request reader are done with it.
class UnaryCall final : public CallHandler, public Call {
 public:
  // Begins a call of the method, of which only the headers have arrived. Its message is read if its
  // caller may make the call. `method` and `data` must outlive the call. May throw std::bad_alloc.
  static CallHandler* Begin(ServiceContext& context, std::string_view method,
                            const CallTable::Data& data, ServerCall& call);

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return wire_.Peer(); }

  // CallHandler
  void OnMessage(InMessage message) override;
  std::shared_ptr<MessagePlaces> Place(std::span<const MessagePiece> begun, int64_t bytes) override;
  void OnHalfClose() override;
  void OnWritten(bool) override {}
  void OnCancel() override;
  void OnDone() override;

 private:
  UnaryCall(ServiceContext& context, std::string_view method, const CallTable::Data& data,
            ServerCall& call)
      : context_(context), method_(method), data_(data), wire_(call) {}
  ~UnaryCall() override = default;
  Status Admit();
  // Called once the message has arrived, or cannot. Null: no memory, and the call has ended.
  std::unique_ptr<Request> MakeRequest();
  void Answer(std::unique_ptr<Request> request);
  // The client sent no message, or left or was cut off in the middle of one. Only in the first case
  // can it receive an answer. Which case it was is known only in OnDone.
  void RecordUnread();

  ServiceContext& context_;
  const std::string_view method_;
  const CallTable::Data& data_;
  const H2Wire wire_;
  CallFacts facts_;  // initially only the caller
  const WatchedRef watched_ = std::make_shared<WatchedCall>();
  bool begun_ = false;
  uint64_t id_ = 0;  // of its request
  std::atomic<bool> admitted_{false};
  std::unique_ptr<Request> unread_;  // of a call without a message
  std::unique_ptr<OpenSpan> span_;   // while the answer is written
};

}  // namespace attend
