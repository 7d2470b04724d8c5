// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one unary call with its retries.

#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "client/rpc/retrying_op.h"
#include "client/wire/message_codec.h"

namespace attend::client {

class UnaryOp final : public RetryingOp, public std::enable_shared_from_this<UnaryOp> {
 public:
  UnaryOp(ConnectionPool* pool, std::shared_ptr<const EncodedCall> call, std::string_view id,
          const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
          CallCallback callback);

  void Start();
  void OnEvent(int slot, bool ok) override;
  void Cancel() override;

 private:
  static constexpr int kFinished = 0;  // the slot

  // These three with mutex_ held.
  void StartAttempt();
  bool TriesAgain(Status& status);  // false: the call ends with `status`
  CallOutcome TakeOutcome(Status status);

  std::shared_ptr<const EncodedCall> call_;
  int connection_ = 0;
  Event finished_{this, kFinished};
  std::optional<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_;
  grpc::ByteBuffer response_;
  grpc::Status grpc_status_;
};

}  // namespace attend::client
