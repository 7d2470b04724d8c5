// SPDX-License-Identifier: Apache-2.0
//
// A call with one small message each way, from its caller's admission to its end. It is answered in
// the queue of small calls (call_queue.h), as no thread that moves bytes may wait for its work.
// SessionService, AdminService and the Open Inference Protocol's small calls differ in a
// ServiceMethod alone: each service has a few.

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

// How calls of a method are charged.
struct ServiceMethod {
  enum class Charge {
    kPlace,  // a place among their tenant's requests in flight, and their bytes
    kBytes,  // for calls that a tenant at its limits may make all the same
    kNone,
  };
  const char* event;  // the log line's, if a call fails
  Scope scope = Scope::kInfo;
  Charge charge = Charge::kPlace;
  // The log has each call, under this name, with its caller and what it asked for; null: failures.
  const char* audit = nullptr;
  int64_t request_bytes_max = int64_t{64} << 10;
};

class ServiceCall {
 public:
  using Ref = std::shared_ptr<ServiceCall>;

  // The carrier of one. The messages live until `finish`, which ends the call.
  struct Wire {
    std::shared_ptr<const WireCall> call;
    const std::string* request;
    std::string* response;
    std::function<void(const Status&)> finish;
  };

  // Admits the caller and takes what the method takes. Null: the call has ended. `method` must
  // outlive the call, and so must `name`, which is as gRPC's paths have it.
  static Ref Begin(ServiceContext& context, const ServiceMethod& method, const std::string& name,
                   Wire wire);

  // Lets in any call that its caller's scope lets in.
  struct Anyone {
    Status operator()(const WireCall&) const { return Status(); }
  };

  // A whole call. `may(wire_call)` is asked before the message is parsed, and may refuse it.
  // `answer(caller, request, response, refusal)`, `answer(request, response)` or `answer(call,
  // request, response)` fills the response, or says why not.
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
  // For the audit, what the caller asked for.
  void set_asked(std::string asked) { asked_ = std::move(asked); }

  // Parses the request and has `answer(request, response)` fill the response, or say why not.
  template <class In, class Out, class Answer>
  Status Try(const Answer& answer) {
    return OrOutOfMemory([&] {
      return AnswerSmallCall<In, Out>(*wire_.request, method_.request_bytes_max, answer,
                                      *wire_.response);
    });
  }

  // Calls `work` in its tenant's turn. An error: the call is to end so.
  template <class Work>
  Status Post(Work work) {
    return OrOutOfMemory([&] {
      return context_.queue.Post(facts_.caller.tenant, std::ssize(*wire_.request), std::move(work));
    });
  }

  // Gives back what was taken, counts and logs the end, and tells the client.
  void End(const Status& status, const Refusal& refusal = {});
  // All of it but the last.
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
