// SPDX-License-Identifier: Apache-2.0
//
// AdminService: an operator's actions on a running server.

#pragma once

#include <functional>
#include <string>
#include <utility>

#include "attend/v1/admin.pb.h"
#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/sessions/session_table.h"

namespace attend {

class AdminServiceImpl final {
 public:
  // The server's side of the calls. Called on any thread.
  struct Hooks {
    std::function<void()> drain;
    std::function<Status()> undrain;
    std::function<void(v1::GetStatusResponse*)> fill_status;
  };
  // `sessions` is null if there are none. `private_sockets`: only the server's own user and root
  // may open its Unix sockets.
  AdminServiceImpl(ServiceContext& context, SessionTable* sessions, bool private_sockets,
                   Hooks hooks)
      : context_(context),
        sessions_(sessions),
        private_sockets_(private_sockets),
        hooks_(std::move(hooks)) {}

  // This must outlive the calls.
  void AddTo(CallTable& table);

 private:
  // Whether admin calls are allowed over the call's transport, once the caller has the scope.
  Status MayComeThisWay(const WireCall& call) const;
  // `answer(request, response)` fills the response or returns an error. Every call is logged with
  // its caller.
  template <class In, class Out, class Answer>
  void Add(CallTable& table, const Answer& answer);
  Status SetLevel(const v1::SetLogLevelRequest& in, v1::SetLogLevelResponse& out);
  Status List(const v1::ListTenantSessionsRequest& in, v1::ListTenantSessionsResponse& out);
  Status Free(const v1::FreeSessionsRequest& in, v1::FreeSessionsResponse& out);
  Status Evict(const v1::EvictTenantRequest& in, v1::EvictTenantResponse& out);
  void FillStatus(v1::GetStatusResponse& out) const;
  void FillTenants(v1::GetStatusResponse& out) const;
  // The index of the tenant with this name.
  Result<int> TenantNamed(const std::string& name) const;

  ServiceContext& context_;
  SessionTable* const sessions_;
  const bool private_sockets_;
  const Hooks hooks_;
};

}  // namespace attend
