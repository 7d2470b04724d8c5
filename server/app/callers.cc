// SPDX-License-Identifier: Apache-2.0

#include "server/app/callers.h"

#include <chrono>
#include <utility>

#include "server/rpc/call_caller.h"
#include "server/util/assign.h"
#include "server/util/wipe.h"

namespace attend {
namespace {

constexpr std::chrono::seconds kLookPeriod{1};

}  // namespace

Result<std::unique_ptr<Callers>> Callers::Load(const Config& config, Metrics& metrics,
                                               Logger& logger) {
  if (config.tokens.empty()) return std::unique_ptr<Callers>();
  std::unique_ptr<Callers> callers(new Callers(metrics));
  Authenticator::Options options;
  options.file = config.tokens;
  options.tenants.clear();
  for (const Tenant& tenant : config.tenants.list()) options.tenants.push_back(tenant.name);
  options.now = [] {
    return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  };
  options.on_reload = [&metrics, &logger](const Status& status, int64_t count) {
    metrics.RecordTokensReload(status.ok());
    if (status.ok()) return logger.Log(LogLevel::info, "tokens reloaded", {{"callers", count}});
    logger.Log(LogLevel::err, "tokens not reloaded; the previous ones stay in use",
               {{"error", status.message()}, {"callers", count}});
  };
  ATTEND_RETURN_IF_ERROR(Assign(callers->authenticator_, Authenticator::Load(std::move(options))));
  return callers;
}

void Callers::Watch(const Clock& clock, std::function<void()> changed) {
  watch_ =
      std::make_unique<PollThread>("attend-tokens", kLookPeriod, clock,
                                   [this, changed = std::move(changed), again = false]() mutable {
                                     const uint64_t before = authenticator_->generation();
                                     authenticator_->Reload();
                                     const bool now = authenticator_->generation() != before;
                                     if (now || again) changed();
                                     again = now;
                                   });
}

void Callers::Guard(RegionSocket::Options& socket) const {
  socket.identify = [this](const std::string& token, const std::string& tenant) {
    return TenantOf(token, tenant);
  };
  socket.on_nobody = [this] { metrics_.RecordRejection(Rejection::kNoCredentials); };
  socket.generation = [this] { return authenticator_->generation(); };
}

Result<int> Callers::TenantOf(const std::string& token, const std::string& tenant) const {
  std::string authorization = "Bearer " + token;
  const WipedAtEnd wiped(authorization);
  Credentials credentials;
  credentials.authorization = authorization;
  if (!tenant.empty()) credentials.tenant = tenant;
  credentials.local = true;
  Decision decision = authenticator_->Decide(credentials, Scope::kCompute);
  if (decision.status.ok()) return decision.caller.tenant;
  metrics_.RecordRejection(RejectionOf(decision.refusal));
  return std::move(decision.status);
}

void LeaveOut(const Caller& caller, const Config& config, v1::GetServerInfoResponse* response) {
  if (!caller.authenticated()) return;
  if (!caller.for_others) {
    response->clear_tenants();
    response->add_tenants(config.tenants.list()[static_cast<size_t>(caller.tenant)].name);
  }
  if (caller.scopes.Has(Scope::kInfo)) return;
  response->clear_build();
  response->clear_kernels();
  response->clear_reference_check();
  response->clear_uptime_seconds();
  for (v1::DeviceInfo& device : *response->mutable_devices()) {
    v1::DeviceInfo left;
    left.set_name(device.name());
    left.set_uuid(device.uuid());  // needed to lend that GPU's memory
    left.set_healthy(device.healthy());
    left.Swap(&device);
  }
}

}  // namespace attend
