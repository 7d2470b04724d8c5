// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one control call, for which the calling thread waits. That thread does
// not poll gRPC, because other calls would then complete on it: the call begins, ends and is
// destroyed on the thread of the pool's control loop. No user code runs there, so control calls may
// be made from callbacks, and under locks that callbacks and deleters take. Client::Close cancels
// those in flight.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/async_unary_call.h>

#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "client/rpc/connections.h"

namespace attend::client {

// The outcome of a control call, besides its response.
struct ControlOutcome {
  Status status;
  Pushback pushback = {};   // with a failure
  std::string server = {};  // the one that answered, as ServerOf
};

// Must be made by std::make_shared.
template <class Response>
class ControlCall final : public Operation {
 public:
  using Reader = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>>;
  // A stub's PrepareAsync function, bound to its stub and its request.
  using Prepare = std::function<Reader(grpc::ClientContext* context, grpc::CompletionQueue* queue)>;

  // `pool` must outlive Make. `timeout` counts from now; 0: none.
  ControlCall(const ConnectionPool& pool, std::chrono::nanoseconds timeout) : pool_(pool) {
    if (timeout.count() > 0) context_->set_deadline(DeadlineAfter(timeout));
  }

  // For metadata, before Make.
  grpc::ClientContext* context() { return &*context_; }

  // To be called once. CANCELLED if Client::Close has begun.
  ControlOutcome Make(const Prepare& prepare, Response* response) {
    if (!loop_->Add(this)) return {Status(Code::kCancelled, "the client is being destroyed")};
    try {
      loop_->Post([&] { Begin(prepare, response); });
    } catch (const std::bad_alloc&) {
      loop_->Remove(this);
      return NoMemory();
    }
    const MutexLock lock(mutex_);
    while (!outcome_) changed_.Wait(mutex_);
    return *std::move(outcome_);
  }

 private:
  static ControlOutcome NoMemory() {
    return {Status(Code::kResourceExhausted, "no memory for the request")};
  }
  void Begin(const Prepare& prepare, Response* response) {
    try {
      reader_ = prepare(&*context_, loop_->queue());
    } catch (const std::bad_alloc&) {  // the request's message
      return End(NoMemory());
    }
    reader_->StartCall();
    reader_->Finish(response, &grpc_status_, ended_event_.Tag());
  }
  void OnEvent(int, bool) override {
    ControlOutcome outcome = {FromGrpc(grpc_status_)};
    if (outcome.status.ok()) outcome.server = pool_.ServerOf(*context_);
    if (!outcome.status.ok()) outcome.pushback = PushbackOf(*context_);
    End(std::move(outcome));
  }
  void End(ControlOutcome outcome) {
    reader_.reset();
    context_.reset();
    loop_->Remove(this);
    const MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
    changed_.NotifyOne();  // under the lock: Make's caller may destroy this
  }
  void Cancel() override {
    loop_->Post([this, self = shared_from_this()] {
      if (context_) context_->TryCancel();  // the call may not have begun
    });
  }

  const ConnectionPool& pool_;
  CompletionLoop* const loop_ = pool_.control_loop();
  // Used by the control loop's thread only, once Make has begun.
  std::optional<grpc::ClientContext> context_{std::in_place};
  Reader reader_;
  grpc::Status grpc_status_;
  Event ended_event_{this, 0};

  Mutex mutex_;
  CondVar changed_;
  std::optional<ControlOutcome> outcome_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
