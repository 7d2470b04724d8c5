// SPDX-License-Identifier: Apache-2.0
//
// Shared by the commands of attend-client: options, errors and the wording of results.

#include <poll.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "client/cli/commands.h"
#include "client/rpc/connections.h"
#include "kernels/util/printable.h"

namespace attend::client {

ClientOptions ClientOptionsOf(const CommonOptions& common) {
  ClientOptions options;
  options.server = common.server;
  options.tls = common.tls;
  options.connections = common.connections;
  options.completion_threads = common.completion_threads;
  if (common.attempts > 0) options.retry.attempts_max = common.attempts;
  const auto seconds = [](double s) {
    return std::chrono::nanoseconds(static_cast<int64_t>(s * 1e9));
  };
  options.keepalive_time = seconds(common.keepalive_time_s);
  options.keepalive_timeout = seconds(common.keepalive_timeout_s);
  options.token = common.token;
  // The calling program may trace this one. An invalid traceparent is ignored, as usual.
  const char* const traceparent = std::getenv("TRACEPARENT");
  if (traceparent != nullptr && CheckTraceParent(traceparent).ok()) {
    options.traceparent = traceparent;
  }
  return options;
}

RunFacts FactsOf(const CommonOptions& common) {
  RunFacts facts;
  facts.tool_version = ATTEND_VERSION;
  facts.command = common.command;
  facts.started = UtcText(std::time(nullptr));
  facts.host = ThisHost();
  return facts;
}

ServerFacts ServerFactsOf(const v1::GetServerInfoResponse& info) {
  ServerFacts facts{info.version(), info.build(), {}, {}};
  for (const v1::DeviceInfo& device : info.devices()) {
    facts.devices.push_back(
        {device.name(), device.description(), device.memory_bytes(), device.units()});
  }
  for (const v1::KernelInfo& kernel : info.kernels()) {
    if (kernel.available()) facts.kernels.push_back(kernel.name());
  }
  return facts;
}

void AddTransport(CLI::App* command, TransportOptions* options) {
  command
      ->add_option_function<std::string>(
          "--transport",
          [options](const std::string& name) {
            options->transport = name == "inline"    ? CallTransport::kInline
                                 : name == "chunked" ? CallTransport::kChunked
                                                     : CallTransport::kAuto;
            options->cuda_ipc = name == "cuda-ipc";
            options->shared_memory = name == "shm" || options->cuda_ipc;
          },
          "inline: in one message; chunked: in chunks over the connections; shm: in memory shared "
          "with a server on this host; cuda-ipc: in GPU memory lent to such a server; auto: "
          "chunked from 16 MiB on, request and answer together, or if the server accepts no "
          "message of that size; else inline")
      ->check(CLI::IsMember({"auto", "inline", "chunked", "shm", "cuda-ipc"}).description(""))
      ->type_name("NAME")
      ->default_str("auto");
  command
      ->add_option("--shared-memory-socket", options->socket,
                   "With --transport shm or cuda-ipc: the server's socket; default: the one that "
                   "the server names")
      ->type_name("PATH");
}

Result<KnownServer> AskServer(Client& client, std::chrono::nanoseconds timeout) {
  KnownServer server;
  Result<v1::GetServerInfoResponse> info = client.GetServerInfo(timeout, &server.address);
  if (!info.ok()) return info.status();
  server.info = std::move(*info);
  return server;
}

Result<std::shared_ptr<SharedMemory>> ConnectShared(const TransportOptions& options,
                                                    const KnownServer& server, const Client& client,
                                                    const std::string& tenant) {
  if (!options.shared_memory) return std::shared_ptr<SharedMemory>();
  const Result<SharedSocket> socket =
      client.FindSharedMemory(server.info, options.socket, server.address);
  if (!socket.ok()) return socket.status();
  return SharedMemory::Connect(*socket, {client.token(), tenant});
}

Result<std::vector<std::string>> CudaDevices(const v1::GetServerInfoResponse& info) {
  if (!info.shared_memory().cuda_ipc()) {
    return Status(Code::kFailedPrecondition,
                  "CUDA IPC is off on this server; its --cuda-ipc turns it on");
  }
  std::vector<std::string> uuids;
  for (const v1::DeviceInfo& device : info.devices()) {
    if (device.healthy() && !device.uuid().empty()) uuids.push_back(device.uuid());
  }
  return uuids;
}

void AddTenant(CLI::App* command, std::string* tenant) {
  command
      ->add_option("--tenant", *tenant,
                   "Tenant to which the requests are charged; default: the server's default tenant")
      ->check([](const std::string& name) { return CheckTenant(name).message(); });
}

void WarnOfTenant(const std::string& tenant, const v1::GetServerInfoResponse& info) {
  if (tenant.empty() || info.tenants_size() == 0) return;  // the server does not list tenants
  std::string known;
  for (const std::string& name : info.tenants()) {
    if (name == tenant) return;
    known += (known.empty() ? "" : ", ") + Printable(name);
  }
  std::fprintf(stderr,
               "attend-client: warning: the server has no tenant \"%s\", only %s: its calls count "
               "as \"default\"\n",
               tenant.c_str(), known.c_str());
}

void WarnOfTenant(const std::string& tenant, Client& client) {
  if (tenant.empty()) return;
  const auto info = client.GetServerInfo(std::chrono::seconds(1));
  if (info.ok()) WarnOfTenant(tenant, *info);
}

const std::atomic<bool>& InstallInterrupt() {
  // The only state that the signal handler uses.
  static std::atomic<bool> interrupted{false};
  static_assert(std::atomic<bool>::is_always_lock_free);
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  return interrupted;
}

bool FlushOutput() { return std::fflush(stdout) == 0 && std::ferror(stdout) == 0; }

int FinishOutput(int exit_code) {
  if (FlushOutput()) return exit_code;
  pollfd reader{STDOUT_FILENO, POLLOUT, 0};
  const bool gone = poll(&reader, 1, 0) > 0 && (reader.revents & POLLERR) != 0;
  if (!gone) std::fprintf(stderr, "attend-client: stdout did not accept all of the output\n");
  return exit_code == kExitOk ? kExitFailed : exit_code;
}

int Fail(const Status& status, int exit_code) {
  // Errors in flags and files are printed without a code, a call's errors with it.
  const std::string text =
      Printable(exit_code == kExitUsage ? status.message() : status.ToString());
  std::fflush(stdout);
  std::fprintf(stderr, "attend-client: %s\n", text.c_str());
  return exit_code;
}

std::string DescribeAnswer(const AttentionResult& r) {
  char text[512];
  const auto ms = [](int64_t ns) { return static_cast<double>(ns) * 1e-6; };
  std::snprintf(text, sizeof text,
                "kernel %s on %s, batch of %lld, server %.3f ms (receive %.3f, queue %.3f, copy in "
                "%.3f, kernel %.3f, copy out %.3f)",
                Printable(r.kernel).c_str(), Printable(r.device).c_str(),
                static_cast<long long>(r.batch_requests), ms(r.timings.total_ns),
                ms(r.timings.receive_ns), ms(r.timings.queue_ns), ms(r.timings.copy_in_ns),
                ms(r.timings.kernel_ns), ms(r.timings.copy_out_ns));
  return text;
}

std::string DescribeCheck(const RowsReport& c) {
  char text[256];
  std::snprintf(text, sizeof text, "%s: max error %.3g, bound %.3g, %lld of %lld rows",
                c.ok          ? "ok"
                : c.undecided ? "NOT JUDGED"
                              : "FAILED",
                c.max_abs_error, c.bound, static_cast<long long>(c.rows_checked),
                static_cast<long long>(c.rows_total));
  std::string line = text;
  if (c.rows_wide > 0) {
    line += ", " + std::to_string(c.rows_wide) + " of them with weights that fp32 leaves uncertain";
  }
  if (c.rows_unjudged > 0) line += ", " + std::to_string(c.rows_unjudged) + " not judged";
  return c.detail.empty() ? line : line + ": " + Printable(c.detail);
}

}  // namespace attend::client
