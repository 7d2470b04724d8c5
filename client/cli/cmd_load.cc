// SPDX-License-Identifier: Apache-2.0
//
// attend-client load: puts load on a server and reports measurements.

#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>

#include "client/cli/commands.h"
#include "client/cli/load_flags.h"
#include "client/cli/load_sessions.h"
#include "client/load/load_plot.h"
#include "client/load/load_runner.h"
#include "client/load/load_search.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/file_io.h"

namespace attend::client {
namespace {

Status WriteReports(const LoadFlags& flags, const std::vector<LoadResult>& results,
                    const std::optional<FoundRate>& found) {
  const std::string json = LoadJson(flags.load, results, found);
  if (!flags.json.empty()) {
    ATTEND_RETURN_IF_ERROR(
        WriteFile(flags.json, {{json.data(), static_cast<int64_t>(json.size())}}));
  }
  if (flags.plot.empty()) return Status();
  const Result<LoadFile> file = ParseLoadFile(flags.json, json);
  if (!file.ok()) return file.status();
  return WritePicture(Draw(LoadFigure(*file)), flags.plot);
}

// Fails early if there is no server, and fetches the facts that the load needs.
Status AskForFacts(LoadFlags* flags) {
  const Result<std::unique_ptr<Client>> client = Client::Make(flags->load.client);
  if (!client.ok()) return client.status();
  const Result<KnownServer> server = AskServer(**client, std::chrono::seconds(5));
  if (!server.ok()) return server.status();
  const v1::GetServerInfoResponse& info = server->info;
  flags->load.client.message_bytes_max = info.limits().request_bytes_max();
  flags->load.facts.server = ServerFactsOf(info);
  WarnOfTenant(flags->load.tenant, info);
  if (flags->transport.shared_memory) {
    const Result<SharedSocket> socket =
        (*client)->FindSharedMemory(info, flags->transport.socket, server->address);
    if (!socket.ok()) return socket.status();
    flags->load.shared_memory_socket = *socket;
    flags->load.server = server->address;
  }
  if (flags->transport.cuda_ipc) {
    const Result<std::vector<std::string>> devices = CudaDevices(info);
    if (!devices.ok()) return devices.status();
    const Result<const CudaDriver*> driver = CudaDriver::Get();
    if (!driver.ok()) return driver.status();
    flags->load.device_memory = [uuids = *devices](int64_t bytes) {
      return LendableMemory(uuids, bytes);
    };
  }
  return Status();
}

// Runs the search of --search-p99.
std::optional<FoundRate> Search(const LoadFlags& flags,
                                const std::function<Status(const LoadStep&)>& measure,
                                const std::vector<LoadResult>& results,
                                const std::atomic<bool>& interrupted, Status* failed) {
  // With fewer requests a p99 is meaningless.
  constexpr double kRequestsMin = 10;
  RateSearch search(flags.rates.empty() ? 0 : flags.steps.front().rate_per_s,
                    flags.search_precision, kRequestsMin / flags.load.duration_s);
  while (!search.done() && !interrupted) {
    *failed = measure({0, search.rate()});
    if (!failed->ok()) return std::nullopt;
    search.Add(MeetsP99(results.back(), flags.search_p99_ms));
  }
  return search.Found(flags.search_p99_ms);
}

int ExitCodeOf(const LoadFlags& flags, const std::vector<LoadResult>& results,
               const std::optional<FoundRate>& found, bool interrupted) {
  if (interrupted) return kExitInterrupted;
  if (found && found->rate_per_s == 0) return kExitFailed;
  for (const LoadResult& result : results) {
    // A search expects refusals above the found rate; wrong answers always fail.
    if (result.stats.checks_failed > 0 || result.verified.failed > 0) return kExitFailed;
    if (!found && result.failed()) return kExitFailed;
  }
  if (!flags.load.stability) return kExitOk;
  const bool stable = std::all_of(results.begin(), results.end(),
                                  [](const LoadResult& result) { return result.stable; });
  return stable ? kExitOk : kExitUnstable;
}

int Run(LoadFlags& flags, const CommonOptions& common) {
  const Status finished = FinishLoadFlags(&flags, common);
  if (!finished.ok()) return Fail(finished, kExitUsage);
  const Status asked = AskForFacts(&flags);
  if (!asked.ok()) {
    return Fail(asked, asked.code() == Code::kInvalidArgument ? kExitUsage : kExitFailed);
  }
  if (!flags.session_counts.empty()) return LoadSessions(flags, InstallInterrupt());
  const Result<Workload> workload = Workload::Make(flags.load);
  if (!workload.ok()) return Fail(workload.status(), kExitUsage);
  VerifyQueue verify(flags.load.verify_bytes_max);
  const std::atomic<bool>& interrupted = InstallInterrupt();
  LoadRunner runner(flags.load, *workload, &verify, &interrupted);

  std::vector<LoadResult> results;
  const auto measure = [&](const LoadStep& step) -> Status {
    Result<LoadResult> result = runner.Run(step);
    if (!result.ok()) return result.status();
    results.push_back(std::move(*result));
    return Status();
  };
  Status failed;
  std::optional<FoundRate> found;
  if (flags.search_p99_ms > 0) {
    found = Search(flags, measure, results, interrupted, &failed);
  } else {
    for (const LoadStep& step : flags.steps) {
      if (interrupted || !failed.ok()) break;
      failed = measure(step);
    }
  }
  if (!failed.ok()) return Fail(failed, kExitFailed);
  // Files first, because stdout's reader may be slow.
  const Status written = WriteReports(flags, results, found);
  std::printf("%s%s", LoadTable(flags.load, results).c_str(),
              found ? DescribeFound(*found).c_str() : "");
  if (!written.ok()) return Fail(written, kExitUsage);
  return ExitCodeOf(flags, results, found, interrupted);
}

}  // namespace

Command AddLoad(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<LoadFlags>();
  CLI::App* command = app.add_subcommand("load", "Put load on a server and measure it");
  AddLoadFlags(command, flags.get());
  return [flags, &common] { return Run(*flags, common); };
}

}  // namespace attend::client
