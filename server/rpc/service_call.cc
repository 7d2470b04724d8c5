// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/service_call.h"

#include "server/rpc/call_caller.h"
#include "server/rpc/call_log.h"

namespace attend {

void SmallCall::OnMessage(InMessage message) {
  wire_.Read();
  if (std::exchange(begun_, true)) return;
  request_ = message.Text();
  Take();
}

void SmallCall::OnHalfClose() {
  if (!begun_) Finish(InvalidArgument("the call has no message"));
}

void SmallCall::Finish(const Status& status) {
  if (status.ok()) wire_.Write(OutMessage::Of(std::move(response_)));
  wire_.End(status);
}

void ServiceCall::Take() {
  bool known = false;
  Status status = OrOutOfMemory([&] {
    const Result<Caller> caller =
        CallerOf(context_, wire_, name_, method_.scope, std::ssize(request_));
    if (!caller.ok()) return caller.status();
    known = true;
    facts_ = FactsOf(context_, name_, *caller, wire_);
    return Admit();
  });
  if (!known) return Finish(status);
  if (status.ok()) {
    status = OrOutOfMemory([&] {
      return context_.queue.Post(facts_.caller.tenant, std::ssize(request_),
                                 [self = Ref(this)] { self->Respond(); });
    });
  }
  if (!status.ok()) End(status);
}

Status ServiceCall::Admit() {
  const auto came = std::ssize(request_);
  if (method_.charge == ServiceMethod::Charge::kBytes) {
    context_.limits.Came(facts_.caller.tenant, came);
  }
  if (method_.charge != ServiceMethod::Charge::kPlace) return Status();
  return context_.limits.BeginSmall(facts_.caller.tenant, place_, came);
}

Status ServiceCall::CheckSize() const {
  if (std::ssize(request_) <= method_.request_bytes_max) return Status();
  return InvalidArgument("the message has " + std::to_string(request_.size()) +
                         " bytes, must have at most " + std::to_string(method_.request_bytes_max));
}

void ServiceCall::Respond() {
  if (wire_.Cancelled()) return End(Status(Code::kCancelled, "the call was cancelled"));
  Refusal refusal;
  const Status status = OrOutOfMemory([&] { return answer_(*this, refusal); });
  End(status, refusal);
}

std::shared_ptr<void> ServiceCall::EndLater() {
  struct Later {
    ~Later() {
      if (self != nullptr) self->Finish(self->ended_);
    }
    std::shared_ptr<ServiceCall> self;  // set once all memory is there
  };
  auto later = std::make_shared<Later>();
  later->self = Ref(this);
  later_ = later;
  return later;
}

void ServiceCall::End(const Status& status, const Refusal& refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const int64_t request_bytes = std::ssize(request_), response_bytes = std::ssize(response_);
  if (method_.charge != ServiceMethod::Charge::kNone) {
    context_.limits.Came(facts_.caller.tenant, response_bytes);
  }
  place_.End(request_bytes, true, true);
  LogEnd(context_, status, {method_.event, request_bytes, response_bytes}, wire_, facts_);
  if (method_.audit != nullptr) {
    const Caller& caller = facts_.caller;
    context_.logger.LogAlways(method_.audit, {{"method", facts_.method},
                                              {"code", CodeName(status.code())},
                                              {"caller", caller.name ? *caller.name : ""},
                                              {"peer", wire_.Peer()},
                                              {"asked", asked_}});
  }
  if (!status.ok()) AddRefusal(context_, status.code(), refusal, wire_);
  if (later_ == nullptr) return Finish(status);
  ended_ = status;
  later_.reset();
}

}  // namespace attend
