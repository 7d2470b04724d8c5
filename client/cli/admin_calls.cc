// SPDX-License-Identifier: Apache-2.0

#include "client/cli/admin_calls.h"

#include "client/rpc/control_call.h"

namespace attend::client {

AdminCalls::AdminCalls(Client& client, std::chrono::duration<double> timeout)
    : client_(client),
      timeout_(std::chrono::duration_cast<std::chrono::nanoseconds>(timeout)),
      stub_(v1::AdminService::NewStub(client.control())) {}

template <class In, class Out>
Result<Out> AdminCalls::Ask(Method<In, Out> method, const In& request) {
  const auto call = std::make_shared<ControlCall<Out>>(client_.pool(), timeout_);
  client_.pool().Introduce("", "", call->context());
  Out response;
  const Status status =
      call->Make([&](auto* context,
                     auto* queue) { return (stub_.get()->*method)(context, request, queue); },
                 &response)
          .status;
  if (!status.ok()) return status;
  return response;
}

using Stub = v1::AdminService::Stub;

Result<v1::DrainResponse> AdminCalls::Drain() {
  return Ask(&Stub::PrepareAsyncDrain, v1::DrainRequest());
}

Result<v1::UndrainResponse> AdminCalls::Undrain() {
  return Ask(&Stub::PrepareAsyncUndrain, v1::UndrainRequest());
}

Result<v1::SetLogLevelResponse> AdminCalls::SetLogLevel(const v1::SetLogLevelRequest& request) {
  return Ask(&Stub::PrepareAsyncSetLogLevel, request);
}

Result<v1::ListTenantSessionsResponse> AdminCalls::ListSessions(
    const v1::ListTenantSessionsRequest& request) {
  return Ask(&Stub::PrepareAsyncListSessions, request);
}

Result<v1::FreeSessionsResponse> AdminCalls::FreeSessions(const v1::FreeSessionsRequest& request) {
  return Ask(&Stub::PrepareAsyncFreeSessions, request);
}

Result<v1::EvictTenantResponse> AdminCalls::EvictTenant(const v1::EvictTenantRequest& request) {
  return Ask(&Stub::PrepareAsyncEvictTenant, request);
}

Result<v1::GetStatusResponse> AdminCalls::GetStatus() {
  return Ask(&Stub::PrepareAsyncGetStatus, v1::GetStatusRequest());
}

}  // namespace attend::client
