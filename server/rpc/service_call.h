// SPDX-License-Identifier: Apache-2.0
//
// Calls with one small message each way.

#pragma once

#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "server/auth/caller.h"
#include "server/limits/tenant_limits.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/rpc/wire_call.h"

namespace attend {

// Reads one message, and answers it with another.
class SmallCall : public SharedHandler {
 public:
  template <class T, class... Args>
  static CallHandler* Begin(ServerCall& call, Args&&... args) {
    T* const made = Own(std::make_shared<T>(call, std::forward<Args>(args)...));
    made->wire_.Read();
    return made;
  }

  // CallHandler. Further messages are read and dropped, so that none is kept.
  void OnMessage(InMessage message) override;
  void OnHalfClose() override;
  void OnWritten(bool) override {}
  void OnCancel() override {}

 protected:
  explicit SmallCall(ServerCall& call) : wire_(call) {}
  // The message has arrived.
  virtual void Take() = 0;
  // Ends the call, with the response if the status is OK.
  void Finish(const Status& status);

  const WireCall wire_;
  std::string request_, response_;

 private:
  bool begun_ = false;  // its message has arrived
};

// How a method's calls are admitted and charged.
struct ServiceMethod {
  enum class Charge {
    kPlace,  // a place among the tenant's requests in flight, and bytes
    kBytes,  // bytes only: allowed at the tenant's limits
    kNone,
  };

  const char* event;  // of the log line, if a call fails
  Scope scope = Scope::kInfo;
  Charge charge = Charge::kPlace;
  // Every call is logged under this name, with its caller and its request; null: only failures.
  const char* audit = nullptr;
  int64_t request_bytes_max = int64_t{64} << 10;
};

// A call that needs a scope. It is answered on the queue of small calls (call_queue.h), because
// threads that move bytes must not wait for it. SessionService, AdminService and the small calls of
// the Open Inference Protocol differ only in their ServiceMethods.
class ServiceCall final : public SmallCall {
 public:
  // Fills in the response or returns an error.
  using Answer = std::function<Status(ServiceCall&, Refusal&)>;

  // `name`, the call's path, and all references must outlive the call.
  ServiceCall(ServerCall& call, ServiceContext& context, const ServiceMethod& method,
              const std::string& name, const Answer& answer)
      : SmallCall(call), context_(context), method_(method), name_(name), answer_(answer) {}

  const WireCall& wire() const { return wire_; }
  const Caller& caller() const { return facts_.caller; }
  // Sets the description of the request for the audit log.
  void set_asked(std::string asked) { asked_ = std::move(asked); }
  // Once the answer is there, the call ends when the last reference to the result is gone.
  std::shared_ptr<void> EndLater();

  // Parses the request; `answer(request, response)` fills the response or returns an error.
  template <class In, class Out, class Fill>
  Status Parse(const Fill& fill) {
    if (MemoryIsShort()) return OutOfMemory();
    ATTEND_RETURN_IF_ERROR(CheckSize());
    google::protobuf::Arena arena;  // Protobuf messages leak if an allocation fails
    auto* const in = google::protobuf::Arena::CreateMessage<In>(&arena);
    auto* const out = google::protobuf::Arena::CreateMessage<Out>(&arena);
    if (!in->ParseFromString(request_)) return InvalidArgument("the message cannot be parsed");
    ATTEND_RETURN_IF_ERROR(fill(*in, *out));
    return out->SerializeToString(&response_) ? Status() : Internal("the answer cannot be written");
  }

 private:
  void Take() override;
  // Identifies the caller, and takes what the method charges.
  Status Admit();
  Status CheckSize() const;
  void Respond();
  // Releases what was taken, counts and logs the end, and answers the client.
  void End(const Status& status, const Refusal& refusal = {});

  ServiceContext& context_;
  const ServiceMethod& method_;
  const std::string& name_;
  const Answer& answer_;
  CallFacts facts_;
  LimitHold place_;
  std::string asked_;
  std::shared_ptr<void> later_;
  Status ended_;  // for EndLater
};

// The path of the method, in the file that defines In, whose request type is In.
template <class In>
const std::string& MethodOf() {
  static const std::string method = [] {
    const google::protobuf::FileDescriptor& file = *In::descriptor()->file();
    for (int s = 0; s < file.service_count(); ++s) {
      const google::protobuf::ServiceDescriptor& service = *file.service(s);
      for (int m = 0; m < service.method_count(); ++m) {
        if (service.method(m)->input_type() != In::descriptor()) continue;
        return "/" + service.full_name() + "/" + service.method(m)->name();
      }
    }
    return std::string();
  }();
  return method;
}

// Allows every call that the scope allows.
struct Anyone {
  Status operator()(const WireCall&) const { return Status(); }
};

// Adds the method whose request type is In. `may(wire_call)` is called before the message is
// parsed, and may refuse it. `answer(caller, request, response, refusal)`,
// `answer(request, response)` or `answer(call, request, response)` fills the response or returns an
// error. `method` must outlive every call.
template <class In, class Out, class Answer, class May = Anyone>
void AddSmall(CallTable& table, const ServiceMethod& method, Answer answer, May may = May()) {
  ServiceCall::Answer respond = [answer, may](ServiceCall& call, Refusal& refusal) -> Status {
    ATTEND_RETURN_IF_ERROR(may(call.wire()));
    return call.Parse<In, Out>([&](const In& in, Out& out) -> Status {
      if constexpr (std::is_invocable_v<const Answer&, const In&, Out&>) {
        return answer(in, out);
      } else if constexpr (std::is_invocable_v<const Answer&, ServiceCall&, const In&, Out&>) {
        return answer(call, in, out);
      } else {
        return answer(call.caller(), in, out, refusal);
      }
    });
  };
  const auto begin = [&context = table.context(), &method, respond](ServerCall& call) {
    return SmallCall::Begin<ServiceCall>(call, context, method, MethodOf<In>(), respond);
  };
  table.Add(MethodOf<In>(), CallTable::kSmall, begin);
}

}  // namespace attend
