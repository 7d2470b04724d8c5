// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the control calls of one session, which go to the session's server.

#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "attend/v1/session.grpc.pb.h"
#include "client/call/retry_policy.h"
#include "client/rpc/connections.h"
#include "client/rpc/control_call.h"
#include "client/wire/message_codec.h"

namespace attend::client {

class SessionCalls {
 public:
  template <class Request, class Response>
  using Method = std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (
      v1::SessionService::Stub::*)(grpc::ClientContext*, const Request&, grpc::CompletionQueue*);

  // Metadata of every call; empty: the client's.
  struct Names {
    std::string tenant;
    std::string traceparent;
  };

  // `pool` must outlive this. `timeout` covers one call with its retries; 0: none. `server`: valid
  // for CheckServer; empty: Create chooses one, if the client has several.
  SessionCalls(const ConnectionPool& pool, Names names, std::chrono::nanoseconds timeout,
               std::string server)
      : pool_(pool), names_(std::move(names)), timeout_(timeout), server_(std::move(server)) {
    stub_ = v1::SessionService::NewStub(pool_.control(server_));
  }

  // Where all calls go; empty if the client has only one server. Create may set it.
  const std::string& server() const { return server_; }

  // A single attempt.
  template <class Request, class Response>
  Status AskOnce(Method<Request, Response> method, std::chrono::nanoseconds timeout,
                 const Request& request, Response* response) const {
    return AskOnce(*stub_, method, timeout, request, response).status;
  }
  // With retries. A session that a repeated Create or Fork left behind ends with its lease.
  template <class Request, class Response>
  Status Ask(Method<Request, Response> method, RetryState retry, const Request& request,
             Response* response) const {
    return Ask(*stub_, method, retry, request, response).status;
  }
  // Creates the session, on any server if none is given; all later calls go to the one that
  // answered.
  Status Create(RetryState retry, const v1::CreateSessionRequest& request, v1::Session* made) {
    ATTEND_RETURN_IF_ERROR(CheckUtf8("device", request.device()));
    const auto method = &v1::SessionService::Stub::PrepareAsyncCreateSession;
    if (!server_.empty() || !pool_.several()) return Ask(method, retry, request, made);
    const auto any = v1::SessionService::NewStub(pool_.control_in_turn());
    ControlOutcome outcome = Ask(*any, method, retry, request, made);
    if (!outcome.status.ok()) return outcome.status;
    server_ = std::move(outcome.server);
    stub_ = v1::SessionService::NewStub(pool_.control(server_));
    return Status();
  }

 private:
  template <class Request, class Response>
  ControlOutcome AskOnce(v1::SessionService::Stub& stub, Method<Request, Response> method,
                         std::chrono::nanoseconds timeout, const Request& request,
                         Response* response) const {
    const auto call = std::make_shared<ControlCall<Response>>(pool_, timeout);
    pool_.Introduce(names_.tenant, names_.traceparent, call->context());
    return call->Make(
        [&](grpc::ClientContext* context, grpc::CompletionQueue* queue) {
          return (stub.*method)(context, request, queue);
        },
        response);
  }

  template <class Request, class Response>
  ControlOutcome Ask(v1::SessionService::Stub& stub, Method<Request, Response> method,
                     RetryState& retry, const Request& request, Response* response) const {
    const TimePoint begin = pool_.clock().Now();
    std::optional<std::chrono::nanoseconds> left;
    if (timeout_.count() > 0) left = timeout_;
    for (;;) {
      ControlOutcome outcome = AskOnce(stub, method, left.value_or(timeout_), request, response);
      if (outcome.status.ok()) return outcome;
      if (left) left = timeout_ - (pool_.clock().Now() - begin);
      const auto wait = retry.AfterFailure(outcome.status.code(), outcome.pushback, left);
      if (!wait) return outcome;
      pool_.clock().SleepFor(*wait);
      if (left)
        *left = std::max<std::chrono::nanoseconds>(*left - *wait, std::chrono::nanoseconds(1));
    }
  }

  const ConnectionPool& pool_;
  const Names names_;
  const std::chrono::nanoseconds timeout_;
  std::string server_;
  std::unique_ptr<v1::SessionService::Stub> stub_;
};

}  // namespace attend::client
