// SPDX-License-Identifier: Apache-2.0
//
// A call with one small message each way, from its caller's admission to its end. It is answered on
// the queue of small calls (call_queue.h), because threads that move bytes must not wait for it.
// SessionService, AdminService and the small calls of the Open Inference Protocol differ only in
// their ServiceMethods.

#pragma once

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
#include "server/rpc/small_call.h"

namespace attend {

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

class ServiceCall {
 public:
  using Ref = std::shared_ptr<ServiceCall>;

  // The carrier of a call. The messages live until `finish`, which ends the call.
  struct Wire {
    std::shared_ptr<const WireCall> call;
    const std::string* request;
    std::string* response;
    std::function<void(const Status&)> finish;
  };

  // Admits the caller and takes what the method charges. Null: the call has ended. `method` and
  // `name`, the call's path, must outlive the call.
  static Ref Begin(ServiceContext& context, const ServiceMethod& method, const std::string& name,
                   Wire wire);

  // Allows every call that the scope allows.
  struct Anyone {
    Status operator()(const WireCall&) const { return Status(); }
  };

  // Handles a whole call. `may(wire_call)` is called before the message is parsed, and may refuse
  // it. `answer(caller, request, response, refusal)`, `answer(request, response)` or `answer(call,
  // request, response)` fills the response or returns an error.
  template <class In, class Out, class Answer, class May = Anyone>
  static void Run(ServiceContext& context, const ServiceMethod& method, Wire wire,
                  const Answer& answer, const May& may = May()) {
    const Ref begun = Begin(context, method, MethodOf<In>(), std::move(wire));
    if (begun == nullptr) return;
    const Status posted =
        begun->Post([begun, answer, may] { begun->template Respond<In, Out>(answer, may); });
    if (!posted.ok()) begun->End(posted);
  }

  const CallFacts& facts() const { return facts_; }
  const WireCall& call() const { return *wire_.call; }
  // Sets the description of the request for the audit log.
  void set_asked(std::string asked) { asked_ = std::move(asked); }

  // Parses the request; `answer(request, response)` fills the response or returns an error.
  template <class In, class Out, class Answer>
  Status Try(const Answer& answer) {
    return OrOutOfMemory([&] {
      return AnswerSmallCall<In, Out>(*wire_.request, method_.request_bytes_max, answer,
                                      *wire_.response);
    });
  }

  // Runs `work` when the tenant's turn comes. On error the call should end with it.
  template <class Work>
  Status Post(Work work) {
    return OrOutOfMemory([&] {
      return context_.queue.Post(facts_.caller.tenant, std::ssize(*wire_.request), std::move(work));
    });
  }

  // Releases what was taken, counts and logs the end, and answers the client.
  void End(const Status& status, const Refusal& refusal = {});
  // Like End, without answering the client.
  void Note(const Status& status);

  ServiceCall(ServiceContext& context, const ServiceMethod& method, CallFacts facts, Wire wire)
      : context_(context), method_(method), facts_(std::move(facts)), wire_(std::move(wire)) {}

 private:
  template <class In, class Out, class Answer, class May>
  void Respond(const Answer& answer, const May& may) {
    if (call().Cancelled()) return End(Status(Code::kCancelled, "the call was cancelled"));
    Refusal refusal;
    const auto ask = [&](const In& in, Out& out) -> Status {
      if constexpr (std::is_invocable_v<const Answer&, const In&, Out&>) {
        return answer(in, out);
      } else if constexpr (std::is_invocable_v<const Answer&, ServiceCall&, const In&, Out&>) {
        return answer(*this, in, out);
      } else {
        return answer(facts_.caller, in, out, refusal);
      }
    };
    Status status = OrOutOfMemory([&] { return may(call()); });
    if (status.ok()) status = Try<In, Out>(ask);
    End(status, refusal);
  }

  ServiceContext& context_;
  const ServiceMethod& method_;
  const CallFacts facts_;
  const Wire wire_;
  LimitHold place_;
  std::string asked_;
};

}  // namespace attend
