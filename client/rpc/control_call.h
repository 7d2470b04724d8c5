// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: one control call, which a thread waits for. The thread does not poll
// gRPC, where other calls' ends would run on it: the call begins, ends and is taken apart on the
// thread of the pool's control loop. No code of the user's runs there, so control calls may be made
// from callbacks, and under locks that callbacks and deleters take. The client's Close ends those
// in flight.

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

// How a control call ended, besides its response.
struct ControlOutcome {
  Status status;
  Pushback pushback = {};   // of a failure
  std::string server = {};  // that answered, as ServerOf says
};

// Only std::make_shared may make one.
template <class Response>
class ControlCall final : public Operation {
 public:
  using Reader = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>>;
  // A stub's PrepareAsync function, bound to its stub and its request.
  using Prepare = std::function<Reader(grpc::ClientContext* context, grpc::CompletionQueue* queue)>;

  // `pool` outlives Make. `timeout` from now on; 0: none.
  ControlCall(const ConnectionPool& pool, std::chrono::nanoseconds timeout) : pool_(pool) {
    if (timeout.count() > 0) context_->set_deadline(DeadlineAfter(timeout));
  }

  // For what goes into its metadata.
  grpc::ClientContext* context() { return &*context_; }

  // Once. CANCELLED once the client's Close has begun.
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
    return {Status(Code::kResourceExhausted, "there is no memory for the request")};
  }
  void Begin(const Prepare& prepare, Response* response) {
    try {
      reader_ = prepare(&*context_, loop_->queue());
    } catch (const std::bad_alloc&) {  // of the request's message
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
    changed_.NotifyOne();  // under the lock: Make's caller destroys this
  }
  void Cancel() override {
    loop_->Post([this, self = shared_from_this()] {
      if (context_) context_->TryCancel();  // it may not have begun
    });
  }

  const ConnectionPool& pool_;
  CompletionLoop* const loop_ = pool_.control_loop();
  // These are the control loop's, once Make has begun.
  std::optional<grpc::ClientContext> context_{std::in_place};
  Reader reader_;
  grpc::Status grpc_status_;
  Event ended_event_{this, 0};

  Mutex mutex_;
  CondVar changed_;
  std::optional<ControlOutcome> outcome_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
