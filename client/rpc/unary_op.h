// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one unary call with its retries.

#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "client/rpc/retrying_op.h"
#include "client/wire/message_codec.h"
#include "kernels/util/mutex.h"

namespace attend::client {

class UnaryOp final : public RetryingOp {
 public:
  UnaryOp(ConnectionPool* pool, std::shared_ptr<const EncodedCall> call, std::string_view id,
          const CallOptions& options, const RetryPolicy& retry, uint64_t seed,
          CallCallback callback);

  void Start();
  void OnEvent(int slot, bool ok) override;

 private:
  static constexpr int kFinished = 0;  // the slot

  // Taken from the operation at its end, to be decoded and released without the lock.
  struct Remains {
    CallOutcome outcome;
    grpc::ByteBuffer response;
    std::shared_ptr<const EncodedCall> call;
  };

  void CancelAttempt() override;
  void StartAttempt() ATTEND_REQUIRES(mutex_);
  // False: the call ends with `status`.
  bool TriesAgain(Status& status) ATTEND_REQUIRES(mutex_);
  Remains TakeRemains(Status status) ATTEND_REQUIRES(mutex_);
  CallOutcome Decode(Remains* remains) const ATTEND_EXCLUDES(mutex_);

  Event finished_{this, kFinished};
  std::shared_ptr<const EncodedCall> call_ ATTEND_GUARDED_BY(mutex_);
  Lease lease_ ATTEND_GUARDED_BY(mutex_);  // of the current attempt
  int connection_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::optional<grpc::ClientContext> context_ ATTEND_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_ ATTEND_GUARDED_BY(mutex_);
  grpc::ByteBuffer response_ ATTEND_GUARDED_BY(mutex_);
  grpc::Status grpc_status_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
