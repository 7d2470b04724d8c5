// SPDX-License-Identifier: Apache-2.0

#include "server/app/heartbeat.h"

#include <grpcpp/client_context.h>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/memory/memory_reserve.h"

namespace attend {

struct Heartbeat::Health {
  const std::unique_ptr<grpc::health::v1::Health::Stub> stub;
};

struct Heartbeat::Call {
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
};

Heartbeat::Heartbeat(const std::shared_ptr<grpc::Channel>& channel, const Clock& clock)
    : health_(new Health{grpc::health::v1::Health::NewStub(channel)}) {
  thread_ = std::make_unique<PollThread>("attend-heart", std::chrono::seconds(1), clock,
                                         [this] { Beat(); });
}

Heartbeat::~Heartbeat() {
  thread_.reset();
  const MutexLock lock(mutex_);
  if (call_ != nullptr) call_->context.TryCancel();
  while (call_ != nullptr) answered_.Wait(mutex_);
}

std::unique_ptr<Heartbeat::Call> Heartbeat::MakeCall() {
  std::unique_ptr<Call> call;
  TryAllocating([&] { call = std::make_unique<Call>(); });
  return call;  // without one, the next beat may have memory
}

// Once the call is there, gRPC starts it with the reserve that is kept for it: a call that counts
// as open has an end.
void Heartbeat::Beat() {
  Call* call = nullptr;
  {
    const MutexLock lock(mutex_);
    if (call_ != nullptr) {
      unanswered_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    call_ = MakeCall();
    call = call_.get();
    if (call == nullptr) return;
  }
  health_->stub->async()->Check(&call->context, &call->request, &call->response,
                                [this](const grpc::Status&) {
                                  const MutexLock lock(mutex_);
                                  call_.reset();
                                  unanswered_.store(0, std::memory_order_relaxed);
                                  answered_.NotifyAll();
                                });
}

}  // namespace attend
