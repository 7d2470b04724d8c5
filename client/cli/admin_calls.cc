// SPDX-License-Identifier: Apache-2.0

#include "client/cli/admin_calls.h"

#include "client/rpc/connections.h"

namespace attend::client {

AdminCalls::AdminCalls(Client& client, std::chrono::duration<double> timeout)
    : client_(client),
      timeout_(std::chrono::duration_cast<std::chrono::nanoseconds>(timeout)),
      stub_(v1::AdminService::NewStub(client.control())) {}

template <class In, class Out>
Result<Out> AdminCalls::Ask(Method<In, Out> method, const In& request) {
  grpc::ClientContext context;
  client_.pool().Introduce("", "", &context);
  context.set_deadline(DeadlineAfter(timeout_));
  Out response;
  const Status status = FromGrpc((stub_.get()->*method)(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

using Stub = v1::AdminService::Stub;

Result<v1::DrainResponse> AdminCalls::Drain() { return Ask(&Stub::Drain, v1::DrainRequest()); }

Result<v1::UndrainResponse> AdminCalls::Undrain() {
  return Ask(&Stub::Undrain, v1::UndrainRequest());
}

Result<v1::SetLogLevelResponse> AdminCalls::SetLogLevel(const v1::SetLogLevelRequest& request) {
  return Ask(&Stub::SetLogLevel, request);
}

Result<v1::ListTenantSessionsResponse> AdminCalls::ListSessions(
    const v1::ListTenantSessionsRequest& request) {
  return Ask(&Stub::ListSessions, request);
}

Result<v1::FreeSessionsResponse> AdminCalls::FreeSessions(const v1::FreeSessionsRequest& request) {
  return Ask(&Stub::FreeSessions, request);
}

Result<v1::EvictTenantResponse> AdminCalls::EvictTenant(const v1::EvictTenantRequest& request) {
  return Ask(&Stub::EvictTenant, request);
}

Result<v1::GetStatusResponse> AdminCalls::GetStatus() {
  return Ask(&Stub::GetStatus, v1::GetStatusRequest());
}

}  // namespace attend::client
