// SPDX-License-Identifier: Apache-2.0
//
// SessionService. Calls are answered on the queue of small calls: forks and truncations may copy a
// page of each layer, and a list may be long.

#pragma once

#include "attend/v1/session.pb.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/rpc/service_call.h"
#include "server/sessions/session_table.h"

namespace attend {

// The number of sessions that a page may have, from the request's page_size.
Result<int64_t> PageSize(int64_t asked);
// Fills in the description of a session for its client.
void FillSession(const Engine& engine, const SessionInfo& info, v1::Session& response);

class SessionServiceImpl final {
 public:
  // `sessions` is null if no device has memory for them: calls are then UNIMPLEMENTED.
  SessionServiceImpl(ServiceContext& context, SessionTable* sessions)
      : context_(context), sessions_(sessions) {}

  // This must outlive the calls.
  void AddTo(CallTable& table);

 private:
  // `answer(tenant, request, response, refusal)` fills the response or returns an error.
  template <class In, class Out, class Answer>
  void Add(CallTable& table, const ServiceMethod& method, const Answer& answer);
  // UNAVAILABLE while the server drains: a new session would end at once.
  Status MayBegin() const;
  Status Create(int tenant, const v1::CreateSessionRequest& request, v1::Session& response);
  Status Fork(int tenant, const v1::ForkSessionRequest& request, v1::Session& response,
              Refusal& refusal);
  Status List(int tenant, const v1::ListSessionsRequest& request,
              v1::ListSessionsResponse& response) const;
  Status Fill(const Result<SessionInfo>& info, v1::Session& response) const;

  ServiceContext& context_;
  SessionTable* const sessions_;
};

}  // namespace attend
