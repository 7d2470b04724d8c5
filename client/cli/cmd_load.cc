// SPDX-License-Identifier: Apache-2.0
//
// attend-client load: puts load on a server and reports what it measured.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <optional>

#include "client/cli/commands.h"
#include "client/cli/load_sessions.h"
#include "client/load/load_runner.h"
#include "client/load/load_search.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/file_io.h"
#include "kernels/util/host_mapping.h"

namespace attend::client {
namespace {

struct LoadFlags {
  LoadOptions load;
  TransportOptions transport;
  std::vector<std::string> shapes;
  std::string mix;
  bool backward = false;
  std::vector<int64_t> concurrency;
  std::vector<double> rates;
  std::string arrivals = "poisson";
  std::vector<std::string> allow;
  double search_p99_ms = 0;
  double search_precision = 0.05;
  std::string json, csv;
};

// The only state that a signal handler may touch.
std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void InstallInterrupt() {
  struct sigaction action = {};
  action.sa_handler = [](int) { g_interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // the second signal kills
  sigaction(SIGINT, &action, nullptr);
}

Result<Code> ParseCode(const std::string& name) {
  for (int code = 1; code <= 16; ++code) {
    if (CodeName(static_cast<Code>(code)) == name) return static_cast<Code>(code);
  }
  return InvalidArgument("--allow " + name + ": not a status code, such as RESOURCE_EXHAUSTED");
}

Status FillMix(LoadFlags* flags) {
  if (!flags->mix.empty()) {
    Result<std::vector<CallSpec>> mix = ReadMix(flags->mix);
    if (!mix.ok()) return mix.status();
    flags->load.mix = std::move(*mix);
  }
  for (const std::string& text : flags->shapes) {
    Result<CallSpec> spec = ParseCallSpec(text);
    if (!spec.ok()) return InvalidArgument("--shape: " + spec.status().message());
    flags->load.mix.push_back(std::move(*spec));
  }
  if (flags->load.mix.empty()) flags->load.mix.push_back(*ParseCallSpec("B1,H8,L128,D64"));
  for (CallSpec& spec : flags->load.mix) spec.backward |= flags->backward;
  return Status();
}

Status Finish(LoadFlags* flags, const CommonOptions& common) {
  ATTEND_RETURN_IF_ERROR(FillMix(flags));
  LoadOptions& load = flags->load;
  load.transport = flags->transport.transport;
  load.client = ClientOptionsOf(common);
  load.client.retry.attempts_max = 1;  // a load that retries would hide refusals
  load.arrivals = flags->arrivals == "poisson" ? Arrivals::kPoisson : Arrivals::kConstant;
  for (const std::string& name : flags->allow) {
    const Result<Code> code = ParseCode(name);
    if (!code.ok()) return code.status();
    load.allowed.insert(*code);
  }
  if (load.stream && (load.deadline_ms > 0 || load.cancel_share > 0 || load.discard_output)) {
    return InvalidArgument(
        "--stream excludes --deadline-ms, --cancel-share and --discard-output: "
        "they belong to single calls");
  }
  if (load.stream && load.transport == CallTransport::kChunked) {
    return InvalidArgument("--stream excludes --transport chunked: its requests are messages");
  }
  if (flags->transport.shared_memory && (load.deadline_ms > 0 || load.cancel_share > 0)) {
    return InvalidArgument(
        "--transport shm and cuda-ipc exclude --deadline-ms and --cancel-share: a request that was "
        "given up may still write where the next one's answer goes");
  }
  if (flags->transport.cuda_ipc && load.check_share > 0) {
    return InvalidArgument(
        "--transport cuda-ipc excludes --check: the server cannot check tensors in a GPU's memory; "
        "--verify checks them here");
  }
  const bool backward = std::any_of(load.mix.begin(), load.mix.end(),
                                    [](const CallSpec& spec) { return spec.backward; });
  if (load.session.sessions > 0 && backward) {
    return InvalidArgument("--sessions excludes backward: keys in sessions have no gradients");
  }
  if (load.session.sessions > 0 && flags->transport.shared_memory) {
    return InvalidArgument("--sessions excludes --transport shm and cuda-ipc");
  }
  if (flags->search_p99_ms > 0 && (!flags->concurrency.empty() || load.count > 0)) {
    return InvalidArgument("--search-p99 excludes --concurrency and --count");
  }
  if (flags->search_p99_ms > 0 && flags->rates.size() > 1) {
    return InvalidArgument("--search-p99 takes one --rate, where it starts");
  }
  load.input_bytes_max = PhysicalMemoryBytes();
  // Checked before the load, so that no measurement is made in vain.
  for (const std::string& path : {flags->json, flags->csv}) {
    if (!path.empty()) ATTEND_RETURN_IF_ERROR(CheckWritable(path));
  }
  return Status();
}

std::vector<LoadStep> StepsOf(const LoadFlags& flags) {
  std::vector<LoadStep> steps;
  for (const int64_t concurrency : flags.concurrency) steps.push_back({concurrency, 0});
  for (const double rate : flags.rates) steps.push_back({0, rate});
  if (steps.empty()) steps.push_back({1, 0});
  return steps;
}

Status WriteReports(const LoadFlags& flags, const std::vector<LoadResult>& results,
                    const std::optional<FoundRate>& found) {
  for (const auto& [path, text] :
       {std::pair{flags.json, flags.json.empty() ? "" : LoadJson(flags.load, results, found)},
        std::pair{flags.csv, flags.csv.empty() ? "" : LoadCsv(flags.load, results, found)}}) {
    if (path.empty()) continue;
    ATTEND_RETURN_IF_ERROR(WriteFile(path, {{text.data(), static_cast<int64_t>(text.size())}}));
  }
  return Status();
}

// Fails early if there is no server, and asks it for what the load must know.
Status AskServer(LoadFlags* flags) {
  const Result<std::unique_ptr<Client>> client = Client::Make(flags->load.client);
  if (!client.ok()) return client.status();
  const auto info = (*client)->GetServerInfo(std::chrono::seconds(5));
  if (!info.ok()) return info.status();
  flags->load.client.message_bytes_max = info->limits().request_bytes_max();
  WarnOfTenant(flags->load.tenant, *info);
  if (flags->transport.shared_memory) {
    const Result<std::string> socket = SharedMemorySocket(flags->transport, *info);
    if (!socket.ok()) return socket.status();
    flags->load.shared_memory_socket = *socket;
  }
  if (flags->transport.cuda_ipc) {
    const Result<std::vector<std::string>> devices = CudaDevices(*info);
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
                                const std::vector<LoadResult>& results, Status* failed) {
  // With fewer requests, a p99 says little.
  constexpr double kRequestsMin = 10;
  RateSearch search(flags.rates.empty() ? 0 : flags.rates.front(), flags.search_precision,
                    kRequestsMin / flags.load.duration_s);
  while (!search.done() && !g_interrupted) {
    *failed = measure({0, search.rate()});
    if (!failed->ok()) return std::nullopt;
    search.Add(MeetsP99(results.back(), flags.search_p99_ms));
  }
  return search.Found(flags.search_p99_ms);
}

int ExitCodeOf(const std::vector<LoadResult>& results, const std::optional<FoundRate>& found) {
  if (g_interrupted) return kExitInterrupted;
  if (found && found->rate_per_s == 0) return kExitFailed;
  for (const LoadResult& result : results) {
    // A search looks for the rate at which the server begins to refuse; wrong answers count always.
    if (result.stats.checks_failed > 0 || result.verified.failed > 0) return kExitFailed;
    if (!found && result.failed()) return kExitFailed;
  }
  return kExitOk;
}

int Run(LoadFlags& flags, const CommonOptions& common) {
  const Status finished = Finish(&flags, common);
  if (!finished.ok()) return Fail(finished, kExitUsage);
  const Status asked = AskServer(&flags);
  if (!asked.ok()) {
    return Fail(asked, asked.code() == Code::kInvalidArgument ? kExitUsage : kExitFailed);
  }
  if (flags.load.session.sessions > 0) {
    InstallInterrupt();
    return LoadSessions(flags.load, flags.json, g_interrupted);
  }
  const Result<Workload> workload = Workload::Make(flags.load);
  if (!workload.ok()) return Fail(workload.status(), kExitUsage);
  VerifyQueue verify(flags.load.verify_bytes_max);
  LoadRunner runner(flags.load, *workload, &verify, &g_interrupted);
  InstallInterrupt();

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
    found = Search(flags, measure, results, &failed);
  } else {
    for (const LoadStep& step : StepsOf(flags)) {
      if (g_interrupted || !failed.ok()) break;
      failed = measure(step);
    }
  }
  if (!failed.ok()) return Fail(failed, kExitFailed);
  std::printf("%s%s", LoadTable(flags.load, results).c_str(),
              found ? DescribeFound(*found).c_str() : "");
  const Status written = WriteReports(flags, results, found);
  if (!written.ok()) return Fail(written, kExitUsage);
  return ExitCodeOf(results, found);
}

void AddShape(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("What is sent");
  command
      ->add_option("--shape", f->shapes,
                   "B1,H8,Hkv8,L128,Lk128,D64,Dv64,dtype=float32,layout=bhld,ragged,causal,window="
                   "L:R,top-left,scale=X,softcap=X,bias,alibi,sinks,lse,backward,kernel=NAME,"
                   "weight=1; give only what differs; repeatable. Default B1,H8,L128,D64")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--mix", f->mix,
                      "JSON file with an array of shapes, see client/load/README.md");
  command->add_flag("--backward", f->backward,
                    "Ask for gradients, whatever the shapes say; their forward passes are made "
                    "before the measurement");
  command->add_option("--pool", f->load.pool, "Number of different inputs for each shape")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--seed", f->load.seed, "Seed for inputs, arrivals and choices")
      ->capture_default_str();
  command->add_flag(
      "--stream", f->load.stream,
      "Use AttendStream, with one stream per connection; with --sessions, for their steps");
}

void AddRate(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("How much");
  command
      ->add_option("--concurrency", f->concurrency,
                   "Closed loop: number of callers, each with one request in flight; "
                   "comma-separated list. Default 1 without --rate")
      ->delimiter(',')
      ->check(CLI::Range(1, 100000));
  command
      ->add_option(
          "--rate", f->rates,
          "Open loop: requests per second, independent of the answers; comma-separated list")
      ->delimiter(',')
      ->check(CLI::Range(1e-3, 1e7));
  command
      ->add_option("--arrivals", f->arrivals,
                   "Open loop: distribution of arrivals, poisson or constant")
      ->check(CLI::IsMember({"poisson", "constant"}))
      ->capture_default_str();
  command->add_option("--warmup", f->load.warmup_s, "Seconds of warm-up before each measurement")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--duration", f->load.duration_s, "Seconds of each measurement")
      ->check(CLI::Range(1e-3, 1e7))
      ->capture_default_str();
  command->add_option("--count", f->load.count, "Requests to measure, instead of --duration")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 50));
  command
      ->add_option("--max-outstanding", f->load.outstanding_max,
                   "Open loop: most requests in flight; later ones wait, and their wait counts. If "
                   "some still wait at the end, they were due but never sent: exit code 1")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  CLI::Option* const search =
      command
          ->add_option("--search-p99", f->search_p99_ms,
                       "Find the highest open-loop rate whose p99, from the intended send time, is "
                       "at most this many milliseconds. Starts at --rate and never tries rates of "
                       "fewer than ten requests per measurement")
          ->check(CLI::Range(1e-3, 1e6));
  command
      ->add_option("--search-precision", f->search_precision,
                   "Relative width at which the search stops")
      ->needs(search)
      ->check(CLI::Range(0.001, 0.5))
      ->capture_default_str();
  command->add_option("--grace", f->load.grace_s, "Seconds to wait for late answers at the end")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
}

void AddFaults(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("Checks and faults (shares in [0, 1])");
  const CLI::Range share(0.0, 1.0);
  command
      ->add_option("--verify", f->load.verify_share,
                   "Share of answers verified here in double precision, on sampled rows, after "
                   "each measurement")
      ->check(share);
  command->add_option("--check", f->load.check_share, "Share of requests that the server checks")
      ->check(share);
  CLI::Option* const deadline =
      command
          ->add_option("--deadline-ms", f->load.deadline_ms, "Deadline in milliseconds; 0 = none")
          ->check(CLI::Range(0.0, 1e9));
  command
      ->add_option("--deadline-share", f->load.deadline_share,
                   "Share of requests with that deadline")
      ->needs(deadline)
      ->check(share)
      ->capture_default_str();
  CLI::Option* const cancel = command
                                  ->add_option("--cancel-share", f->load.cancel_share,
                                               "Share of requests that are cancelled")
                                  ->check(share);
  command
      ->add_option("--cancel-after-ms", f->load.cancel_after_ms,
                   "Cancel at a random time up to this many milliseconds")
      ->needs(cancel)
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command
      ->add_option(
          "--allow", f->allow,
          "Status codes that do not count as failures, such as RESOURCE_EXHAUSTED; comma-separated")
      ->delimiter(',');
}

void AddOutput(CLI::App* command, LoadFlags* f) {
  command->option_defaults()->group("Output");
  command->add_option("--json", f->json, "Write the results to this file as JSON");
  command->add_option("--csv", f->csv,
                      "Write the results to this file as CSV, one line per measurement");
  command->add_flag("--quiet", f->load.quiet, "Print no progress lines");
  command->add_flag(
      "--discard-output", f->load.discard_output,
      "Drop answers that are not verified, without copying them out of gRPC's buffers");
}

}  // namespace

Command AddLoad(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<LoadFlags>();
  CLI::App* command = app.add_subcommand("load", "Put load on a server and measure it");
  AddShape(command, flags.get());
  AddRate(command, flags.get());
  AddFaults(command, flags.get());
  command->option_defaults()->group("Options");
  AddTransport(command, &flags->transport);
  AddTenant(command, &flags->load.tenant);
  AddOutput(command, flags.get());
  AddSessionLoad(command, &flags->load.session);
  return [flags, &common] { return Run(*flags, common); };
}

}  // namespace attend::client
