// SPDX-License-Identifier: Apache-2.0
//
// attend-client info: prints the server's version, devices, kernels and limits.

#include <array>
#include <cmath>
#include <cstdio>
#include <string>

#include "client/cli/commands.h"
#include "client/wire/json.h"
#include "kernels/util/counted.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

struct InfoOptions {
  bool json = false;
  bool health = false;
  bool all = false;
  double timeout_s = 5;
};

const char* HealthName(Health health) {
  static constexpr const char* kNames[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};
  return kNames[static_cast<int>(health)];
}

// The server's text without control characters, which a terminal would obey.
std::string Shown(const std::string& text) { return Printable(text); }

template <class Names>
std::string Listed(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + Shown(name);
  return text;
}

void PrintDevices(const v1::GetServerInfoResponse& info) {
  for (const v1::DeviceInfo& device : info.devices()) {
    std::printf("device       %s: %s, %s, %s, %s (batches at once)%s\n",
                Shown(device.name()).c_str(), Shown(device.description()).c_str(),
                BytesText(device.memory_bytes()).c_str(), Counted(device.units(), "unit").c_str(),
                Counted(device.lanes(), "lane").c_str(), device.healthy() ? "" : ", NOT HEALTHY");
  }
}

// `all`: also kernels that no device of the server can run.
void PrintKernels(const v1::GetServerInfoResponse& info, bool all) {
  for (const v1::KernelInfo& kernel : info.kernels()) {
    if (!kernel.available() && !all) continue;
    std::string dtypes;
    for (const int dtype : kernel.dtypes()) {
      if (!dtypes.empty()) dtypes += " ";
      dtypes += DTypeName(static_cast<DType>(dtype));
    }
    std::printf("kernel       %-18s %s, %s, head dim to %d%s\n             %-18s %s\n",
                Shown(kernel.name()).c_str(), Shown(kernel.device_kind()).c_str(), dtypes.c_str(),
                kernel.head_dim_max(), kernel.available() ? "" : ", not available here", "",
                Shown(kernel.summary()).c_str());
  }
}

void PrintLimits(const v1::Limits& limits) {
  std::printf("limits       a message %s; memory for requests %s; queue %s\n",
              BytesText(limits.request_bytes_max()).c_str(),
              BytesText(limits.memory_budget_bytes()).c_str(),
              Counted(limits.queue_requests_max(), "request").c_str());
  std::printf("             B %lld, H %lld, L %lld, D %lld; %lld unanswered on a stream\n",
              Int(limits.batch_max()), Int(limits.heads_max()), Int(limits.length_max()),
              Int(limits.head_dim_max()), Int(limits.stream_requests_max()));
  const std::string cost = limits.request_gflop_max() > 0
                               ? std::to_string(Int(std::llround(limits.request_gflop_max())))
                               : "any number of";
  std::printf("             a request costs %s GFLOP; %lld accepted with a check\n", cost.c_str(),
              Int(limits.checks_max()));
}

void PrintSessions(const v1::GetServerInfoResponse& info) {
  const v1::SessionsInfo& sessions = info.sessions();
  std::printf("sessions     %lld, of at most %s; lease %.0f s unless asked for\n",
              Int(sessions.sessions_max()), Counted(sessions.layers_max(), "layer").c_str(),
              sessions.lease_seconds_default());
  for (const v1::DeviceInfo& device : info.devices()) {
    std::printf("             %s: memory %s, in pages of %s\n", Shown(device.name()).c_str(),
                BytesText(device.session_bytes_max()).c_str(),
                Counted(sessions.page_tokens(), "token").c_str());
  }
}

bool IsBytes(const v1::TenantLimit& limit) {
  return limit.name().starts_with("bytes") || limit.name().ends_with("memory");
}

std::string AmountText(const v1::TenantLimit& limit, int64_t amount) {
  if (IsBytes(limit)) return BytesText(amount);
  if (!limit.name().starts_with("gflop")) return std::to_string(amount);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g GFLOP", static_cast<double>(amount) * 1e-9);
  return text.data();
}

// Limits without a bound and without a count are left out.
void PrintTenant(const v1::TenantInfo& tenant) {
  std::printf("tenant       %s\n", Shown(tenant.name()).c_str());
  for (const v1::TenantLimit& limit : tenant.limits()) {
    if (!limit.has_most() && limit.used() == 0) continue;
    std::string bound = "no limit";
    if (limit.per_second() > 0) {
      bound = AmountText(limit, limit.per_second()) + " a second, burst " +
              AmountText(limit, limit.most());
    } else if (limit.has_most()) {
      bound = "at most " + AmountText(limit, limit.most());
    }
    std::printf("             %-18s %s; taken %s, refused %s\n", Shown(limit.name()).c_str(),
                bound.c_str(), AmountText(limit, limit.used()).c_str(),
                Counted(limit.refused(), "time").c_str());
  }
}

void Print(const v1::GetServerInfoResponse& info, const Result<Health>& health,
           const std::string& server, bool all) {
  std::printf("server       %s, attend %s\n", server.c_str(), Shown(info.version()).c_str());
  std::printf("build        %s\n", Shown(info.build()).c_str());
  std::printf("health       %s\n",
              health.ok() ? HealthName(*health) : Shown(health.status().ToString()).c_str());
  std::printf("up           %.1f s\n", info.uptime_seconds());
  PrintDevices(info);
  PrintKernels(info, all);
  PrintLimits(info.limits());
  std::printf("transports   %s\n", Listed(info.transports()).c_str());
  if (info.has_sessions()) PrintSessions(info);
  if (info.has_shared_memory()) {
    const v1::SharedMemoryInfo& shared = info.shared_memory();
    std::printf("shm          %s, at most %s, %s and %s for one client\n",
                Shown(shared.socket()).c_str(), BytesText(shared.bytes_max()).c_str(),
                BytesText(shared.client_bytes_max()).c_str(),
                Counted(shared.client_regions_max(), "region").c_str());
  }
  if (info.tenants_size() > 0) {
    std::printf("tenants      %s\n", Listed(info.tenants()).c_str());
  }
  if (info.has_tenant()) PrintTenant(info.tenant());
  std::printf("checks       %s\n", Shown(info.reference_check()).c_str());
}

int Run(const InfoOptions& options, const CommonOptions& common) {
  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  const std::chrono::nanoseconds timeout(static_cast<int64_t>(options.timeout_s * 1e9));
  if (options.health) {
    const Result<Health> health = (*client)->CheckHealth("", timeout);
    if (!health.ok()) return Fail(health.status(), kExitFailed);
    std::printf("%s\n", HealthName(*health));
    return *health == Health::kServing ? kExitOk : kExitFailed;
  }
  const Result<v1::GetServerInfoResponse> info = (*client)->GetServerInfo(timeout);
  if (!info.ok()) return Fail(info.status(), kExitFailed);
  if (!options.json) {
    Print(*info, (*client)->CheckHealth("", timeout), common.server, options.all);
    return kExitOk;
  }
  std::printf("%s\n", JsonOf(*info, /*indent=*/1).c_str());
  return kExitOk;
}

}  // namespace

Command AddInfo(CLI::App& app, const CommonOptions& common) {
  const auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "Print the server's version, devices, kernels and limits");
  command->add_flag("--json", options->json,
                    "Print all of it as JSON, 64-bit numbers as numbers, bytes in hexadecimal");
  command->add_flag("--all", options->all, "Also kernels that none of the devices can run");
  command->add_flag("--health", options->health,
                    "Print only the health; exit code 0 if it is SERVING, for health checks");
  command->add_option("--timeout-s", options->timeout_s, "Seconds to wait for the server")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
