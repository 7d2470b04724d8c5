// SPDX-License-Identifier: Apache-2.0
//
// SessionService on gRPC's callback API. A call is answered on the thread that brought it, but for
// forks and truncations: those may copy a page of each layer, and do it on the copy threads.

#pragma once

#include <grpcpp/grpcpp.h>

#include "attend/v1/session.grpc.pb.h"
#include "server/rpc/call_context.h"
#include "server/sessions/session_table.h"

namespace attend {

struct ServiceMethod;

// What a client is told of a session.
void FillSession(const Engine& engine, const SessionInfo& info, v1::Session& response);

class SessionServiceImpl final
    : public v1::SessionService::WithRawCallbackMethod_CreateSession<
          v1::SessionService::WithRawCallbackMethod_ForkSession<
              v1::SessionService::WithRawCallbackMethod_TruncateSession<
                  v1::SessionService::WithRawCallbackMethod_FreeSession<
                      v1::SessionService::WithRawCallbackMethod_GetSession<
                          v1::SessionService::WithRawCallbackMethod_ListSessions<
                              v1::SessionService::WithRawCallbackMethod_KeepAlive<
                                  v1::SessionService::Service>>>>>>> {
 public:
  // `sessions` is null if no device has memory for them: calls are then UNIMPLEMENTED.
  SessionServiceImpl(ServiceContext& context, SessionTable* sessions)
      : context_(context), sessions_(sessions) {}

  using Reactor = grpc::ServerUnaryReactor;
  using Call = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  Reactor* CreateSession(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ForkSession(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* TruncateSession(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* FreeSession(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* GetSession(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ListSessions(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* KeepAlive(Call* call, const Bytes* request, Bytes* response) override;

 private:
  // `answer(tenant, request, response, refusal)` fills the response, or says why not.
  template <class In, class Out, class Answer>
  Reactor* Run(const ServiceMethod& method, Call* call, const Bytes* request, Bytes* response,
               const Answer& answer);
  // UNAVAILABLE while the server drains: a new session would end at once.
  Status MayBegin() const;
  Status Create(int tenant, const v1::CreateSessionRequest& request, v1::Session& response);
  Status Fill(const Result<SessionInfo>& info, v1::Session& response) const;

  ServiceContext& context_;
  SessionTable* const sessions_;
};

}  // namespace attend
