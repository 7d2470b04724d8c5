// SPDX-License-Identifier: Apache-2.0
//
// AdminService on gRPC's callback API: what an operator does to a running server. Each call is
// answered on the copy threads, as a drain tells every stream.

#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <string>
#include <utility>

#include "attend/v1/admin.grpc.pb.h"
#include "server/rpc/call_context.h"
#include "server/sessions/session_table.h"

namespace attend {

class AdminServiceImpl final
    : public v1::AdminService::WithRawCallbackMethod_Drain<
          v1::AdminService::WithRawCallbackMethod_Undrain<
              v1::AdminService::WithRawCallbackMethod_SetLogLevel<
                  v1::AdminService::WithRawCallbackMethod_ListSessions<
                      v1::AdminService::WithRawCallbackMethod_FreeSessions<
                          v1::AdminService::WithRawCallbackMethod_EvictTenant<
                              v1::AdminService::WithRawCallbackMethod_GetStatus<
                                  v1::AdminService::Service>>>>>>> {
 public:
  // What the server does when it is asked. Any thread.
  struct Hooks {
    std::function<void()> drain;
    std::function<Status()> undrain;
    std::function<void(v1::GetStatusResponse*)> fill_status;
  };
  // `sessions` is null if there are none. `private_sockets`: nobody but the server's own user, and
  // root, may open any of its Unix sockets.
  AdminServiceImpl(ServiceContext& context, SessionTable* sessions, bool private_sockets,
                   Hooks hooks)
      : context_(context),
        sessions_(sessions),
        private_sockets_(private_sockets),
        hooks_(std::move(hooks)) {}

  using Reactor = grpc::ServerUnaryReactor;
  using Call = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  Reactor* Drain(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* Undrain(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* SetLogLevel(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* ListSessions(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* FreeSessions(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* EvictTenant(Call* call, const Bytes* request, Bytes* response) override;
  Reactor* GetStatus(Call* call, const Bytes* request, Bytes* response) override;

 private:
  // Whether callers with the scope may come from where this one does.
  Status MayComeThisWay(const WireCall& call) const;
  // `answer(request, response)` fills the response, or says why not. The log has each call, and by
  // whom.
  template <class In, class Out, class Answer>
  Reactor* Respond(Call* call, const Bytes* request, Bytes* response, const Answer& answer);
  Status List(const v1::ListTenantSessionsRequest& in, v1::ListTenantSessionsResponse& out);
  Status Free(const v1::FreeSessionsRequest& in, v1::FreeSessionsResponse& out);
  Status Evict(const v1::EvictTenantRequest& in, v1::EvictTenantResponse& out);
  void FillTenants(v1::GetStatusResponse& out) const;
  // The index of the tenant with this name.
  Result<int> TenantNamed(const std::string& name) const;

  ServiceContext& context_;
  SessionTable* const sessions_;
  const bool private_sockets_;
  const Hooks hooks_;
};

}  // namespace attend
