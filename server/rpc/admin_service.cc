// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/admin_service.h"

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/util/counted.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/service_call.h"
#include "server/rpc/session_service.h"
#include "server/wire/session_uses.h"

namespace attend {
namespace {

constexpr size_t kAskedBytesMax = 200;  // bytes of a request's fields in the log
constexpr int64_t kFreed = 1024;        // maximum number of ids in a request

constexpr ServiceMethod kMethod{.event = "admin call failed",
                                .scope = Scope::kAdmin,
                                .charge = ServiceMethod::Charge::kNone,
                                .audit = "admin call"};

// The request as logged. Session ids are left out: they are the tenants' secrets.
template <class In>
std::string Asked(const In& in) {
  if constexpr (std::is_same_v<In, v1::FreeSessionsRequest>) {
    if (in.sessions_size() > 0) return Counted(in.sessions_size(), "session");
  }
  return in.ShortDebugString().substr(0, kAskedBytesMax);
}

}  // namespace

Status AdminServiceImpl::MayComeThisWay(const WireCall& call) const {
  if (context_.authenticator == nullptr) {
    // Access is controlled by the socket file's mode.
    if (private_sockets_) return Status();
    return Status(Code::kPermissionDenied,
                  "admin calls need --tokens, because users other than the server's own may open "
                  "its Unix sockets (socket-mode)");
  }
  if (call.peer().local || call.peer().certified) return Status();
  return Status(Code::kPermissionDenied,
                "admin calls need loopback, a Unix socket or a client certificate");
}

template <class In, class Out, class Answer>
void AdminServiceImpl::Add(CallTable& table, const Answer& answer) {
  AddSmall<In, Out>(
      table, kMethod,
      [answer](ServiceCall& call, const In& in, Out& out) -> Status {
        call.set_asked(Asked(in));
        return answer(in, out);
      },
      [this](const WireCall& call) { return MayComeThisWay(call); });
}

Result<int> AdminServiceImpl::TenantNamed(const std::string& name) const {
  const std::vector<Tenant>& tenants = context_.engine.options().tenants.list();
  for (size_t n = 0; n < tenants.size(); ++n) {
    if (tenants[n].name == name) return static_cast<int>(n);
  }
  return InvalidArgument("tenant is \"" + name.substr(0, kTenantNameBytesMax) +
                         "\", must be one of the server's");
}

Status AdminServiceImpl::SetLevel(const v1::SetLogLevelRequest& in, v1::SetLogLevelResponse& out) {
  const std::optional<LogLevel> level = ParseLogLevel(in.level());
  if (!level) {
    return InvalidArgument("level is \"" + in.level().substr(0, 16) +
                           "\", must be trace, debug, info, warn, error or off");
  }
  out.set_before(std::string(LogLevelName(context_.logger.level())));
  context_.logger.set_level(*level);
  return Status();
}

Status AdminServiceImpl::List(const v1::ListTenantSessionsRequest& in,
                              v1::ListTenantSessionsResponse& out) {
  if (sessions_ == nullptr) return SessionsAreOff();
  const Result<int64_t> count = PageSize(in.page_size());
  if (!count.ok()) return count.status();
  SessionTable::Listed list;
  if (in.tenant().empty()) {
    list = sessions_->ListAll(in.after(), *count);
  } else {
    const Result<int> tenant = TenantNamed(in.tenant());
    if (!tenant.ok()) return tenant.status();
    list = sessions_->List(*tenant, in.after(), *count);
  }
  out.set_more(list.more);
  for (const SessionInfo& info : list.sessions) {
    v1::TenantSession& session = *out.add_sessions();
    session.set_tenant(context_.engine.options().tenants.list()[info.tenant].name);
    FillSession(context_.engine, info, *session.mutable_session());
  }
  return Status();
}

Status AdminServiceImpl::Free(const v1::FreeSessionsRequest& in, v1::FreeSessionsResponse& out) {
  if (sessions_ == nullptr) return SessionsAreOff();
  if (in.sessions().empty() == in.tenant().empty()) {
    return InvalidArgument("exactly one of sessions and tenant must be given");
  }
  if (in.sessions_size() > kFreed) {
    return InvalidArgument("sessions has " + std::to_string(in.sessions_size()) +
                           " entries, must have at most " + std::to_string(kFreed));
  }
  if (!in.tenant().empty()) {
    const Result<int> tenant = TenantNamed(in.tenant());
    if (!tenant.ok()) return tenant.status();
    out.set_freed(sessions_->FreeTenant(*tenant));
    return Status();
  }
  int64_t freed = 0;
  for (const std::string& id : in.sessions()) freed += sessions_->FreeAny(id) ? 1 : 0;
  out.set_freed(freed);
  out.set_not_found(in.sessions_size() - freed);
  return Status();
}

Status AdminServiceImpl::Evict(const v1::EvictTenantRequest& in, v1::EvictTenantResponse& out) {
  if (sessions_ == nullptr) return SessionsAreOff();
  const Result<int> tenant = TenantNamed(in.tenant());
  if (!tenant.ok()) return tenant.status();
  const SessionTable::Evicted evicted = sessions_->EvictTenant(*tenant, in.pinned());
  out.set_sessions(evicted.sessions);
  out.set_bytes(evicted.bytes);
  return Status();
}

void AdminServiceImpl::FillStatus(v1::GetStatusResponse& out) const {
  hooks_.fill_status(&out);
  out.set_draining(context_.engine.draining());
  out.set_log_level(std::string(LogLevelName(context_.logger.level())));
  out.set_inflight_requests(context_.engine.inflight());
  for (const Engine::DeviceState& state : context_.engine.Devices()) {
    v1::GetStatusResponse::Device& device = *out.add_devices();
    device.set_name(state.info.name);
    device.set_healthy(state.healthy);
    device.set_queued_requests(state.queued);
  }
  FillTenants(out);
}

void AdminServiceImpl::FillTenants(v1::GetStatusResponse& out) const {
  const std::vector<Tenant>& tenants = context_.engine.options().tenants.list();
  std::vector<int64_t> count(tenants.size()), bytes(tenants.size());
  if (sessions_ != nullptr) {
    count = sessions_->tenant_sessions();
    for (size_t device = 0; device < context_.engine.Devices().size(); ++device) {
      const std::vector<int64_t> there = sessions_->tenant_bytes(static_cast<int>(device));
      for (size_t n = 0; n < bytes.size(); ++n) bytes[n] += there[n];
    }
  }
  for (size_t n = 0; n < tenants.size(); ++n) {
    v1::GetStatusResponse::Tenant& tenant = *out.add_tenants();
    tenant.set_name(tenants[n].name);
    tenant.set_sessions(count[n]);
    tenant.set_session_bytes(bytes[n]);
  }
}

void AdminServiceImpl::AddTo(CallTable& table) {
  Add<v1::DrainRequest, v1::DrainResponse>(table, [this](const auto&, auto& out) {
    hooks_.drain();
    out.set_inflight_requests(context_.engine.inflight());
    return Status();
  });
  Add<v1::UndrainRequest, v1::UndrainResponse>(
      table, [this](const auto&, auto&) { return hooks_.undrain(); });
  Add<v1::SetLogLevelRequest, v1::SetLogLevelResponse>(
      table, [this](const auto& in, auto& out) { return SetLevel(in, out); });
  Add<v1::ListTenantSessionsRequest, v1::ListTenantSessionsResponse>(
      table, [this](const auto& in, auto& out) { return List(in, out); });
  Add<v1::FreeSessionsRequest, v1::FreeSessionsResponse>(
      table, [this](const auto& in, auto& out) { return Free(in, out); });
  Add<v1::EvictTenantRequest, v1::EvictTenantResponse>(
      table, [this](const auto& in, auto& out) { return Evict(in, out); });
  Add<v1::GetStatusRequest, v1::GetStatusResponse>(
      table, [this](const auto&, auto& out) { return FillStatus(out), Status(); });
}

}  // namespace attend
