// SPDX-License-Identifier: Apache-2.0
//
// AdminService, over a client's connections. Calls are not retried: if an answer is lost, `status`
// shows what the call did.

#pragma once

#include <chrono>
#include <memory>

#include "attend/v1/admin.grpc.pb.h"
#include "client/client.h"

namespace attend::client {

class AdminCalls {
 public:
  // `client` must outlive this.
  AdminCalls(Client& client, std::chrono::duration<double> timeout);

  Result<v1::DrainResponse> Drain();
  Result<v1::UndrainResponse> Undrain();
  Result<v1::SetLogLevelResponse> SetLogLevel(const v1::SetLogLevelRequest& request);
  Result<v1::ListTenantSessionsResponse> ListSessions(const v1::ListTenantSessionsRequest& request);
  Result<v1::FreeSessionsResponse> FreeSessions(const v1::FreeSessionsRequest& request);
  Result<v1::EvictTenantResponse> EvictTenant(const v1::EvictTenantRequest& request);
  Result<v1::GetStatusResponse> GetStatus();

 private:
  template <class In, class Out>
  using Method = std::unique_ptr<grpc::ClientAsyncResponseReader<Out>> (v1::AdminService::Stub::*)(
      grpc::ClientContext*, const In&, grpc::CompletionQueue*);
  template <class In, class Out>
  Result<Out> Ask(Method<In, Out> method, const In& request);

  const Client& client_;
  const std::chrono::nanoseconds timeout_;
  const std::unique_ptr<v1::AdminService::Stub> stub_;
};

}  // namespace attend::client
