// SPDX-License-Identifier: Apache-2.0

#include "server/app/config.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>

#include "kernels/contract/backend.h"
#include "kernels/util/processors.h"
#include "server/app/config_group.h"
#include "server/app/config_help.h"
#include "server/app/config_values.h"
#include "server/app/limits_file.h"
#include "server/memory/host_memory.h"
#include "server/regions/unix_listener.h"
#include "server/sessions/session_table.h"
#include "server/util/byte_size.h"

namespace attend {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// gRPC clients keep a message's size in a signed 32-bit integer.
constexpr int64_t kMessageBytesMax = (int64_t{2} << 30) - (int64_t{128} << 10);
// With room for fewer messages, connections would be closed although their calls respect
// --max-request-bytes.
constexpr int64_t kMessageMemoryMessagesMin = 4;
// The default of --max-calls allows this many connections with --max-streams calls each.
constexpr int64_t kFullConnections = 16;

void AddDevices(CLI::App& app, Config& c) {
  Group group(app, "Devices");
  group.Text("--device", c.device, "LIST", CheckDevice,
             "auto (every usable GPU, else the CPU), cpu, cuda:all, or a list: cuda:0,cuda:1");
  group.Int("--lanes", c.lanes, 0, 64,
            "Batches that run concurrently on each device. 0: 4 on a GPU, 2 on the CPU");
  group.Int("--cpu-threads", c.cpu_threads, 0, 4096,
            "Threads that compute on the CPU. 0: one per processor that the server may use");
  group.Bytes("--lane-workspace", c.lane_workspace_bytes, 0, kBytesMax,
              "Device memory that each lane allocates at start");
  group.Bytes("--staging-max", c.staging_max_bytes, 0, kBytesMax,
              "Memory on each GPU that receives AttendChunked uploads while they arrive, at most a "
              "quarter of the GPU's memory. 0: uploads are copied once they are complete");
  group.Bytes("--staging-min", c.staging_min_bytes, 1, kBytesMax,
              "Uploads below this size are copied once they are complete");
  group.Gone("--split-gflop",
             "a request runs on one GPU; to use several, send its sequences or heads as separate "
             "requests");
}

void AddLimits(CLI::App& app, Config& c) {
  Group group(app, "Limits");
  group.Bytes("--max-request-bytes", c.max_request_bytes, 1024, kMessageBytesMax,
              "Largest request message, and largest answer to one. AttendChunked requests are "
              "limited by their tenant's part of three quarters of --memory-budget instead, and "
              "tensors in shared memory by --shared-memory-client-max");
  group
      .Bytes("--memory-budget", c.memory_budget_bytes, 4096, kBytesMax,
             "Host memory for the tensors of all requests together; requests that do not fit are "
             "refused")
      ->default_str("4GiB, at most a quarter of the machine's or container's memory");
  group.Bytes("--receive-memory", c.receive_memory_bytes, 0, kBytesMax,
              "Memory that receives messages, in multiples of 2 MiB. With GPUs it is page-locked "
              "at start, so that they read tensors in place; without GPUs, only what is used is "
              "allocated. Tensors that arrive elsewhere are copied. 0 disables it");
  group
      .Bytes("--message-memory-max", c.message_memory_max_bytes, 0, kBytesMax,
             "Bytes outside the memory budget for messages that the server has not taken yet or "
             "that a GPU reads in place. Incomplete messages may take three quarters of it; above "
             "that, the connections that hold the most are closed. 0: no limit")
      ->default_str("--memory-budget, at least 4 x --max-request-bytes");
  group.Gone("--grpc-memory-max", "--message-memory-max limits the memory of messages");
  group.Int("--max-queue", c.max_queue, 1, 1 << 24,
            "Requests that may wait for one device; further ones are refused");
  group
      .Number("--max-request-gflop", c.max_request_gflop, 0, 1e15, "GFLOP",
              "GFLOP (10^9 FLOPs) that one request may cost on its device, with its kernel "
              "(server/schedule/README.md, What one request may cost). 0: no limit")
      ->default_str("what the device computes in ten minutes");
}

void AddSharedMemory(CLI::App& app, Config& c) {
  Group group(app, "Shared memory");
  group.Flag("--shared-memory", c.shared_memory,
             "Let clients on this host put tensors into memory shared with the server");
  group
      .Text("--shared-memory-socket", c.shared_memory_socket, "PATH", nullptr,
            "Unix socket where clients request shared memory; its folder is created if missing")
      ->default_str(DefaultSocketPath());
  group.Bytes("--shared-memory-max", c.shared_memory_max_bytes, 4096, kBytesMax,
              "Total bytes of all shared regions");
  group.Bytes("--shared-memory-client-max", c.shared_memory_client_max_bytes, 4096, kBytesMax,
              "Total bytes of one connection's shared regions");
  group.Int("--shared-memory-client-regions", c.shared_memory_client_regions, 1, 1 << 16,
            "Shared regions that one connection may have");
  group.Flag("--shared-memory-any-user", c.shared_memory_any_user,
             "Give shared memory to processes of any user, not only the server's own");
  group.Flag("--cuda-ipc", c.cuda_ipc,
             "Let these clients lend GPU memory (CUDA IPC), which kernels then read and write in "
             "place. Needs --shared-memory and a GPU. A client that frees lent memory while it is "
             "in use can take the device down");
}

void AddOip(CLI::App& app, Config& c) {
  Group group(app, "Open Inference Protocol");
  group.Flag("--oip", c.oip,
             "Serve inference.GRPCInferenceService too, for clients of KServe and Triton");
  group.Text("--oip-shared-memory", c.oip_shared_memory, "PREFIX", CheckKeyPrefix,
             "Let its clients register shared memory (shm_open) whose key begins with PREFIX, such "
             "as /attend, or / for any key; with --tenant, the key must begin with PREFIX, the "
             "tenant's name and a colon. Needs --oip. Empty: none");
  group.Text("--oip-shared-memory-owner", c.oip_shared_memory_owner, "USER", nullptr,
             "User who must own that shared memory, by name or number. Empty: the server's own");
  group.Int("--oip-shared-memory-regions", c.oip_shared_memory_regions, 1, 1 << 16,
            "Regions of either kind that one tenant may have registered; each system shared memory "
            "region takes a descriptor");
  group.Bytes("--oip-shared-memory-bytes", c.oip_shared_memory_bytes, 1, kBytesMax,
              "Bytes of shm_open memory that one tenant may have registered. Pages that answers "
              "are written to are charged to the server's cgroup");
  group.Flag("--oip-cuda-shared-memory", c.oip_cuda_shared_memory,
             "Let its clients register GPU memory (CUDA IPC). Any client that can connect and has "
             "a handle may do so, regardless of user or tenant. Needs --oip and --cuda-ipc");
}

void AddSessions(CLI::App& app, Config& c) {
  Group group(app, "Sessions");
  group
      .Bytes("--session-memory", c.session_memory_bytes, 0, kBytesMax,
             "Memory on each device for the K and V of sessions, 8 MiB or more. 0: no sessions")
      ->default_str("an eighth of the memory that the server may use; a quarter of a GPU's");
  group.Number(
      "--session-lease", c.session_lease_seconds, 1, 86400, "SECONDS",
      "Seconds after its last use at which a session ends, unless it asked for another lease");
  group.Int("--max-sessions", c.max_sessions, 1, 1 << 20, "Sessions that may exist at once");
}

void AddBatches(CLI::App& app, Config& c) {
  Group group(app, "Batches");
  group.Int("--max-batch-requests", c.max_batch_requests, 1, 1 << 16, "Requests in one batch");
  group.Number("--max-batch-gflop", c.max_batch_gflop, 0, 1e12, "GFLOP",
               "Cost of one batch in GFLOP (10^9 FLOPs; server/schedule/README.md); a larger "
               "request runs alone. 0: 2 on the CPU, 2000 on a GPU");
  group.Bytes("--max-batch-bytes", c.max_batch_bytes, 1, kBytesMax,
              "Bytes of tensors and kernel workspace in one batch");
  group.Int(
      "--max-batch-delay-us", c.max_batch_delay_us, 0, 10'000'000,
      "Microseconds that a request may wait for others to join its batch even if a lane is free");
}

void AddFairness(CLI::App& app, Config& c, std::vector<std::string>& tenants) {
  Group group(app, "Fairness");
  group
      .Add("--tenant", tenants,
           "A tenant and its share of the server: NAME=WEIGHT, with a whole weight from 1 to 1000. "
           "Separate several by commas or repeat the flag. A call names its tenant in the metadata "
           "x-attend-tenant; calls that name none of these belong to \"default\". With --tokens, "
           "\"default\" has a part of its own only if it is given here, or if no other tenant is")
      ->type_name("TENANT")
      ->delimiter(',')
      ->expected(1, kTenantsMax)
      ->default_str("default=1")
      ->check(CLI::Validator(CheckTenant, "", ""));
  group.Text("--limits", c.limits_file, "FILE", nullptr,
             "What each tenant may take: requests in flight, bytes and GFLOP a second, and more "
             "(server/limits/README.md). Reloaded on SIGHUP. Empty: 256 small calls");
  group.Int("--priority-aging-ms", c.priority_aging_ms, 1, 3'600'000,
            "Milliseconds that requests of higher priority may overtake a request; after that, "
            "every fourth batch begins with such a request");
}

void AddChecks(CLI::App& app, Config& c) {
  Group group(app, "Reference check");
  group.Text("--reference-check", c.reference_check, "MODE", CheckReferenceCheck,
             "Compare answers with a double-precision reference: off (only if a request asks for "
             "it), sample:P (a fraction P of all requests, 0 to 1) or all");
  group.Number("--check-seed", c.check_seed, 0, UINT64_MAX, "N",
               "Seed that selects the requests and rows to check");
  group.Int("--check-threads", c.check_threads, 1, 256, "Threads that run reference checks");
  group.Int("--max-checks", c.max_checks, 1, 1 << 20,
            "Accepted requests that may have a check pending; further ones that ask for a check "
            "are refused");
  group.Text(
      "--check-dump-dir", c.check_dump_dir, "PATH", nullptr,
      "Folder for requests whose check failed, for attend-client replay. Empty: none are written");
  group.Int(
      "--check-dump-max", c.check_dump_max, 0, 1 << 20,
      "Maximum number of requests written; at most half of them with tensors in shared memory");
  group.Number("--check-dump-interval", c.check_dump_interval_seconds, 0, 1e6, "SECONDS",
               "Minimum seconds between two written requests of the same transport and kernel");
}

void AddProcess(CLI::App& app, Config& c) {
  Group group(app, "Process");
  group.Int("--copy-threads", c.copy_threads, 0, 256,
            "Threads that copy messages above 1 MiB. 0: half the hardware threads, 4 to 8");
  group.Number("--drain-timeout", c.drain_timeout_seconds, 0, 86400, "SECONDS",
               "Seconds that accepted requests have to finish after SIGTERM or SIGINT");
  group.Text("--log-level", c.log_level, "LEVEL",
             OneOf({"trace", "debug", "info", "warn", "error", "off"}),
             "Lowest level to log: trace, debug, info, warn, error or off");
  group.Text("--log-format", c.log_format, "FORMAT", OneOf({"text", "json"}),
             "Log format: text, or json with one object per line");
  group.Text("--log-file", c.log_file, "PATH", nullptr,
             "Append log lines to this file, and reopen it on SIGHUP. Empty: stderr");
  group.Number("--log-rate", c.log_rate, 0, 1e6, "N",
               "Lines per second of each kind of warning and error, after a burst of 20 seconds' "
               "worth; suppressed lines are counted. 0: no limit");
  group.Flag(
      "--allocator-tuning", c.allocator_tuning,
      "Keep freed memory in the process (glibc), which is faster but raises its resident size");
  group.Flag("--core-dumps", c.core_dumps,
             "Let core files and debuggers of the server's user see its memory, including private "
             "keys and callers' tokens. Without it, /proc/PID belongs to root");
}

// Sets the memory limits that were not given, and refuses limits that cannot be met.
void SetMemory(const CLI::App& app, const MemoryLimit& limit, Config& c) {
  const auto given = [&app](const char* name) { return app.get_option(name)->count() > 0; };
  if (!given("--memory-budget")) c.memory_budget_bytes = DefaultMemoryBudget(limit.bytes);
  if (c.memory_budget_bytes > limit.bytes) {
    throw CLI::ValidationError("--memory-budget", RoundByteSize(c.memory_budget_bytes) +
                                                      " exceeds the memory of " + limit.whose +
                                                      ", " + RoundByteSize(limit.bytes));
  }
  c.session_memory_is_default = !given("--session-memory");
  if (c.session_memory_is_default) c.session_memory_bytes = limit.bytes / 8 / kMiB * kMiB;
  const int64_t slab = SessionOptions::kSlabBytes;
  if (c.session_memory_bytes > 0 && c.session_memory_bytes < slab && given("--session-memory")) {
    throw CLI::ValidationError(
        "--session-memory",
        FormatByteSize(c.session_memory_bytes) + " must be 0 or at least " + FormatByteSize(slab));
  }
  if (!given("--message-memory-max")) c.message_memory_max_bytes = DefaultMessageMemoryMax(c);
  if (c.message_memory_max_bytes > 0 &&
      c.message_memory_max_bytes / kMessageMemoryMessagesMin < c.max_request_bytes) {
    throw CLI::ValidationError("--message-memory-max",
                               FormatByteSize(c.message_memory_max_bytes) +
                                   " must be 0 or at least four times --max-request-bytes, " +
                                   FormatByteSize(c.max_request_bytes));
  }
}

}  // namespace

int64_t DefaultMemoryBudget(int64_t memory_bytes) {
  const int64_t quarter = std::max(kMiB, memory_bytes / 4 / kMiB * kMiB);
  return std::min(Config().memory_budget_bytes, quarter);
}

int64_t DefaultMessageMemoryMax(const Config& config) {
  return std::max(config.memory_budget_bytes, kMessageMemoryMessagesMin * config.max_request_bytes);
}

ConfigOutcome ParseConfig(int argc, const char* const* argv, Config& config, std::string& text) {
  CLI::App app("Serves exact attention over gRPC.", "attend-server");
  app.set_version_flag("--version", VersionText());
  // CLI11 does not read the environment variable of this option.
  const char* const file = std::getenv("ATTEND_CONFIG");
  app.set_config("--config", file != nullptr ? file : "",
                 "Read settings from a TOML or INI file: listen = \"...\"", file != nullptr)
      ->envname("ATTEND_CONFIG")
      ->type_name("FILE");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.footer(
      "In [brackets]: the default and the environment variable. BYTES take a unit: B, KiB, MiB, "
      "GiB,\nTiB, or K, KB and so on for the same powers of 1024. A flag overrides --config, "
      "which\noverrides the environment. SIGTERM or SIGINT drains the server, which then exits "
      "with 0; a\nsecond one, at least a second later, ends it at once. SIGHUP reopens "
      "--log-file\nand reloads what can change (server/app/README.md, Start and end).");
  app.formatter(std::make_shared<HelpFormatter>());
  app.get_formatter()->column_width(36);
  AddNetwork(app, config);
  AddCallers(app, config);
  AddDevices(app, config);
  AddLimits(app, config);
  AddSharedMemory(app, config);
  AddOip(app, config);
  AddSessions(app, config);
  AddBatches(app, config);
  std::vector<std::string> tenants;
  AddFairness(app, config, tenants);
  AddChecks(app, config);
  AddProcess(app, config);
  AddObserving(app, config);
  try {
    app.parse(argc, argv);
    Result<Tenants> parsed = Tenants::Parse(tenants);
    if (!parsed.ok()) throw CLI::ValidationError("--tenant", parsed.status().message());
    config.tenants = config.tokens.empty() ? std::move(*parsed) : parsed->ForKnownCallers();
    if (!config.limits_file.empty()) {
      Result<std::vector<TenantBounds>> limits = ReadLimits(config.limits_file, config.tenants);
      if (!limits.ok()) throw CLI::ValidationError("--limits", limits.status().message());
      config.limits = std::move(*limits);
    }
    CheckNeeds("--cuda-ipc", config.cuda_ipc, config.shared_memory,
               "--shared-memory, whose socket it uses");
    CheckNetwork(config);
    CheckCallers(config);
    CheckObserving(config);
    CheckNeeds("--oip-shared-memory", !config.oip_shared_memory.empty(), config.oip, "--oip");
    CheckNeeds("--oip-cuda-shared-memory", config.oip_cuda_shared_memory, config.oip, "--oip");
    CheckNeeds("--oip-cuda-shared-memory", config.oip_cuda_shared_memory, config.cuda_ipc,
               "--cuda-ipc");
    SetMemory(app, ProcessMemoryLimit(), config);
  } catch (const CLI::CallForHelp&) {
    text = app.help();
    return ConfigOutcome::kPrinted;
  } catch (const CLI::CallForVersion&) {
    text = VersionText() + "\n";
    return ConfigOutcome::kPrinted;
  } catch (const CLI::Error& error) {
    text = ErrorLine(app, error);
    return ConfigOutcome::kError;
  }
  config.check_sample = SampleOf(config.reference_check);
  return ConfigOutcome::kRun;
}

int64_t MaxCalls(const Config& config) {
  return config.max_calls > 0 ? config.max_calls : kFullConnections * config.max_streams;
}

int64_t MaxCallsPerPeer(const Config& config) {
  const int64_t all = MaxCalls(config);
  const int64_t wanted = config.max_calls_per_peer > 0
                             ? config.max_calls_per_peer
                             : std::max((all + 3) / 4, config.max_streams);
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, all - all / 8));
}

int64_t MaxStreams(const Config& config) {
  return std::min(config.max_streams, MaxCallsPerPeer(config));
}

int CopyThreads(const Config& config) {
  if (config.copy_threads > 0) return static_cast<int>(config.copy_threads);
  const int cores = Processors();
  return std::clamp(cores / 2, std::clamp(cores, 1, 4), 8);
}

const char* Version() { return ATTEND_VERSION; }

std::string BuildText() {
  return "gcc " __VERSION__ ", " ATTEND_BUILD_TYPE ", CUDA " + CudaBuildVersion();
}

std::string VersionText() {
  return "attend-server " + std::string(Version()) + " (" + BuildText() + ")";
}

}  // namespace attend
