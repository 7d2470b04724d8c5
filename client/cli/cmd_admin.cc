// SPDX-License-Identifier: Apache-2.0
//
// attend-client admin: operations on a running server.

#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/call/listed_ids.h"
#include "client/cli/admin_calls.h"
#include "client/cli/commands.h"
#include "client/cli/session_id.h"
#include "kernels/util/counted.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

struct AdminFlags {
  double timeout_s = 5;
  double wait_s = 0;  // for drain
  std::string level;
  std::string tenant;
  std::vector<std::string> ids;  // in hexadecimal
  bool pinned = false;
};

int Drain(const AdminFlags& flags, AdminCalls& calls) {
  const Result<v1::DrainResponse> drained = calls.Drain();
  if (!drained.ok()) return Fail(drained.status(), kExitFailed);
  int64_t left = drained->inflight_requests();
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(flags.wait_s);
  while (left > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const Result<v1::GetStatusResponse> status = calls.GetStatus();
    if (!status.ok()) return Fail(status.status(), kExitFailed);
    left = status->inflight_requests();
  }
  std::printf("draining, %s to finish\n", Counted(left, "request").c_str());
  return left > 0 && flags.wait_s > 0 ? kExitFailed : kExitOk;
}

int Undrain(const AdminFlags&, AdminCalls& calls) {
  const Result<v1::UndrainResponse> done = calls.Undrain();
  if (!done.ok()) return Fail(done.status(), kExitFailed);
  std::printf("takes new work\n");
  return kExitOk;
}

int SetLogLevel(const AdminFlags& flags, AdminCalls& calls) {
  v1::SetLogLevelRequest request;
  request.set_level(flags.level);
  const Result<v1::SetLogLevelResponse> set = calls.SetLogLevel(request);
  if (!set.ok()) return Fail(set.status(), kExitFailed);
  std::printf("log level %s, was %s\n", flags.level.c_str(), Printable(set->before()).c_str());
  return kExitOk;
}

int ListSessions(const AdminFlags& flags, AdminCalls& calls) {
  v1::ListTenantSessionsRequest request;
  request.set_tenant(flags.tenant);
  ListedIds listed;
  for (;;) {
    const Result<v1::ListTenantSessionsResponse> list = calls.ListSessions(request);
    if (!list.ok()) return Fail(list.status(), kExitFailed);
    for (const v1::TenantSession& each : list->sessions()) {
      const v1::Session& session = each.session();
      if (const Status taken = listed.Take(session.id(), each.ByteSizeLong()); !taken.ok()) {
        return Fail(taken, kExitFailed);
      }
      std::printf("%s  %-16s %-8s tokens %-10lld %10s  lease %.0f s%s\n",
                  SessionIdText(session.id()).c_str(), Printable(each.tenant()).c_str(),
                  Printable(session.device()).c_str(), Int(session.length()),
                  BytesText(session.bytes()).c_str(), session.lease_seconds_left(),
                  session.pinned() ? "  pinned" : "");
    }
    if (list->sessions_size() == 0) return kExitOk;
    request.set_after(listed.last());
  }
}

int FreeSessions(const AdminFlags& flags, AdminCalls& calls) {
  v1::FreeSessionsRequest request;
  request.set_tenant(flags.tenant);
  for (const std::string& id : flags.ids) request.add_sessions(ParseSessionId(id).id);
  const Result<v1::FreeSessionsResponse> freed = calls.FreeSessions(request);
  if (!freed.ok()) return Fail(freed.status(), kExitFailed);
  std::printf("freed %s, %lld not found\n", Counted(freed->freed(), "session").c_str(),
              Int(freed->not_found()));
  return freed->not_found() == 0 ? kExitOk : kExitFailed;
}

int Evict(const AdminFlags& flags, AdminCalls& calls) {
  v1::EvictTenantRequest request;
  request.set_tenant(flags.tenant);
  request.set_pinned(flags.pinned);
  const Result<v1::EvictTenantResponse> evicted = calls.EvictTenant(request);
  if (!evicted.ok()) return Fail(evicted.status(), kExitFailed);
  std::printf("evicted the tokens of %s, freed %s\n",
              Counted(evicted->sessions(), "session").c_str(), BytesText(evicted->bytes()).c_str());
  return kExitOk;
}

int PrintStatus(const AdminFlags&, AdminCalls& calls) {
  const Result<v1::GetStatusResponse> status = calls.GetStatus();
  if (!status.ok()) return Fail(status.status(), kExitFailed);
  std::printf("attend %s, up %.0f s, %s, log level %s\n", Printable(status->version()).c_str(),
              status->uptime_seconds(),
              status->ending()     ? "ending"
              : status->draining() ? "draining"
                                   : "takes new work",
              Printable(status->log_level()).c_str());
  std::printf("%s in flight, %s\n", Counted(status->inflight_requests(), "request").c_str(),
              Counted(status->connections(), "connection").c_str());
  for (const v1::GetStatusResponse::Device& device : status->devices()) {
    std::printf("device %s: %s waiting%s\n", Printable(device.name()).c_str(),
                Counted(device.queued_requests(), "request").c_str(),
                device.healthy() ? "" : ", NOT HEALTHY");
  }
  for (const v1::GetStatusResponse::Tenant& tenant : status->tenants()) {
    std::printf("tenant %s: %s, %s\n", Printable(tenant.name()).c_str(),
                Counted(tenant.sessions(), "session").c_str(),
                BytesText(tenant.session_bytes()).c_str());
  }
  return kExitOk;
}

using AdminCommands = Subcommands<AdminFlags, AdminCalls>;

void AddAll(AdminCommands* commands) {
  AdminFlags* const f = commands->flags;
  CLI::App* command =
      commands->Add("drain", "Refuse new work, and finish accepted requests", Drain);
  command
      ->add_option("--wait-s", f->wait_s,
                   "Seconds to wait for them to finish; exit code 1 if some have not")
      ->check(CLI::Range(0.0, 1e6));
  commands->Add("undrain", "Take new work again", Undrain);
  command = commands->Add("log-level", "Set the lowest level that is logged", SetLogLevel);
  command->add_option("level", f->level, "trace, debug, info, warn, error or off")
      ->required()
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}));
  command = commands->Add("sessions", "List sessions of all tenants, or of one", ListSessions);
  command->add_option("--tenant", f->tenant, "Only sessions of this tenant");
  command = commands->Add("free", "End sessions: those named, or all of a tenant", FreeSessions);
  CLI::Option* const ids = command->add_option("id", f->ids, "Ids of the sessions");
  ids->check(CheckSessionId)->type_name("ID");
  command->add_option("--tenant", f->tenant, "All sessions of this tenant")->excludes(ids);
  command =
      commands->Add("evict", "Evict the tokens of a tenant's sessions that are not in use", Evict);
  command->add_option("tenant", f->tenant, "Whose")->required();
  command->add_flag("--pinned", f->pinned, "Include pinned sessions");
  commands->Add("status", "Print the server's state", PrintStatus);
}

}  // namespace

Command AddAdmin(CLI::App& app, const CommonOptions& common) {
  CLI::App* const admin = app.add_subcommand("admin",
                                             "Operate a server; needs the scope admin, or the "
                                             "server's Unix socket (server/app/README.md)");
  admin->require_subcommand(1);
  const auto flags = std::make_shared<AdminFlags>();
  const auto commands = std::make_shared<AdminCommands>(AdminCommands{admin, flags.get(), {}});
  admin->add_option("--timeout-s", flags->timeout_s, "Seconds that each call may take")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  AddAll(commands.get());
  return [flags, commands, &common] {
    const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
    if (!client.ok()) return Fail(client.status(), kExitUsage);
    AdminCalls calls(**client, std::chrono::duration<double>(flags->timeout_s));
    return commands->Run(calls);
  };
}

}  // namespace attend::client
