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
#include "server/rpc/wire_call.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

class UnaryCall final : public SharedHandler, public Call {
 public:
  // Adds a method, whose message is read if its caller may make the call. The arguments must
  // outlive the table's calls.
  static void Add(CallTable& table, const char* method, const MessageFormat& format, Pass pass);

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
  UnaryCall(ServiceContext& context, std::string_view method, const MessageFormat& format,
            Pass pass, ServerCall& call)
      : context_(context), method_(method), format_(format), pass_(pass), wire_(call) {}
  Status Admit();
  // Called once the message has arrived, or cannot. Null: no memory, and the call has ended.
  std::unique_ptr<Request> MakeRequest();
  void Answer(std::unique_ptr<Request> request);
  // The client sent no message, or left or was cut off in the middle of one. Only in the first case
  // can it receive an answer. Which case it was is known only in OnDone.
  void RecordUnread();

  ServiceContext& context_;
  const std::string_view method_;
  const MessageFormat& format_;
  const Pass pass_;
  const WireCall wire_;
  CallFacts facts_;  // initially only the caller
  bool begun_ = false;
  uint64_t id_ = 0;  // of its request
  std::atomic<bool> admitted_{false};
  std::unique_ptr<Request> unread_;  // of a call without a message
  std::unique_ptr<OpenSpan> span_;   // while the answer is written
};

}  // namespace attend
