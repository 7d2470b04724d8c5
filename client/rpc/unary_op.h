// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one unary call with its retries. Keeps itself alive from Start to the
// return of its callback; events come on completion threads, Cancel from anywhere.

#pragma once

#include <grpcpp/alarm.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "client/call/call_options.h"
#include "client/call/retry_policy.h"
#include "client/rpc/connections.h"
#include "client/wire/message_codec.h"

namespace attend::client {

class UnaryOp final : public Operation, public std::enable_shared_from_this<UnaryOp> {
 public:
  UnaryOp(ConnectionPool* pool, std::shared_ptr<const EncodedCall> call, std::string_view id,
          const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
          CallCallback callback);

  void Start();
  void OnEvent(int slot, bool ok) override;
  void Cancel() override;

 private:
  enum Slot { kFinished, kBackoff };
  using Clock = std::chrono::steady_clock;

  // These three with mutex_ held.
  void StartAttempt();
  bool ScheduleRetry(Status& status);  // false: the call ends with `status`
  CallOutcome TakeOutcome(Status status);
  void End(CallOutcome outcome);

  ConnectionPool* const pool_;
  std::shared_ptr<const EncodedCall> call_;
  const std::string id_;
  const CallOptions options_;
  const Clock::time_point deadline_;
  CallCallback callback_;
  CompletionLoop* home_ = nullptr;  // where the operation is registered
  std::shared_ptr<UnaryOp> self_;   // while gRPC holds an event

  std::mutex mutex_;
  RetryState retry_;
  bool cancelled_ = false;
  int connection_ = 0;
  Event finished_{this, kFinished};
  Event backoff_{this, kBackoff};
  std::optional<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_;
  grpc::ByteBuffer response_;
  grpc::Status grpc_status_;
  std::optional<grpc::Alarm> alarm_;
};

}  // namespace attend::client
