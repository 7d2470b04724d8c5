// SPDX-License-Identifier: Apache-2.0
//
// One unary call for one attention.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "server/rpc/call_context.h"
#include "server/rpc/data_wire.h"
#include "server/wire/message_format.h"

namespace attend {

// Deleted when the wire and the request reader are done with it.
class UnaryCall final : public UnaryHandler, public Call {
 public:
  // For that pass. `format` must outlive the call, `wire` its OnDone.
  UnaryCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format, Pass pass,
            UnaryWire& wire);

  // Once, with what has come: not valid if nothing has.
  void Begin(const ArrivedMessage& message);

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return wire_.call().Peer(); }

  // UnaryHandler
  void OnCancel() override;
  void OnDone() override;

 private:
  ~UnaryCall() override = default;
  void Answer(std::unique_ptr<Request> request);
  // A wire hands over a call without a message if its client sent none, and also if the client
  // went, or was cut off, before the message was whole. Only the first is there to hear an answer;
  // which it was is not known before OnDone.
  void EndWithoutMessage(std::unique_ptr<Request> request);
  void RecordUnread();

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  UnaryWire& wire_;
  const WatchedRef watched_ = std::make_shared<WatchedCall>();
  std::unique_ptr<Request> request_;  // until Begin
  const uint64_t id_;
  std::atomic<bool> admitted_{false};
  std::unique_ptr<Request> unread_;  // of a call without a message
  std::unique_ptr<OpenSpan> span_;   // while the answer is written
};

}  // namespace attend
