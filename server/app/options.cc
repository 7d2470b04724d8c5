// SPDX-License-Identifier: Apache-2.0

#include "server/app/options.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "kernels/util/processors.h"
#include "server/regions/unix_listener.h"
#include "server/util/thresholds.h"
#include "server/wire/chunk_codec.h"

namespace attend {
Duration Seconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

Dumper::Options MakeDumperOptions(const Config& config) {
  Dumper::Options options;
  options.directory = config.check_dump_dir;
  options.dumps_max = config.check_dump_max;
  options.interval = Seconds(config.check_dump_interval_seconds);
  options.check_seed = config.check_seed;
  return options;
}

LogSettings MakeLogSettings(const Config& config) {
  LogSettings settings;
  settings.level = spdlog::level::from_str(config.log_level);
  settings.file = config.log_file;
  if (config.log_format == "json") settings.options.format = LogFormat::kJson;
  settings.options.rate = config.log_rate;
  return settings;
}

bool SocketsArePrivate(const Config& config) {
  if (config.socket_mode.empty()) return config.socket_group.empty();
  return (std::stoi(config.socket_mode, nullptr, 8) & 077) == 0;
}

SharedMemoryOptions MakeSharedMemoryOptions(const Config& config) {
  TenantWeights weights = config.tenants.weights();
  // Without tokens the socket's clients belong to no tenant; the first one gets the whole share.
  if (config.tokens.empty()) std::fill(weights.begin() + 1, weights.end(), 0);
  return {.socket = {.path = config.shared_memory_socket.empty() ? DefaultSocketPath()
                                                                 : config.shared_memory_socket,
                     .any_user = config.shared_memory_any_user,
                     .tenant_weights = weights},
          .limits = {weights, config.shared_memory_max_bytes, config.shared_memory_client_max_bytes,
                     config.shared_memory_client_regions},
          .cuda_ipc = config.cuda_ipc};
}

int64_t SessionTableBytes(const Config& config) {
  constexpr int64_t kShareOfBudget = 16;
  constexpr int64_t kLeast = int64_t{1} << 20;
  return std::max(kLeast, config.memory_budget_bytes / kShareOfBudget);
}

std::vector<TenantBounds> MakeTenantBounds(const Config& config) {
  return config.limits_file.empty() ? std::vector<TenantBounds>(config.tenants.list().size())
                                    : config.limits;
}

SessionOptions MakeSessionOptions(const Config& config) {
  SessionOptions options{.tenant_weights = config.tenants.weights()};
  options.lease_default = Seconds(config.session_lease_seconds);
  options.sessions_max = config.max_sessions;
  options.table_bytes_max = SessionTableBytes(config);
  return options;
}

int64_t SessionBytes(const Config& config, const DeviceInfo& device) {
  constexpr int64_t kShareOfGpu = 4;
  const bool own = device.kind == DeviceKind::kCuda && config.session_memory_is_default;
  return own ? device.memory_bytes / kShareOfGpu : config.session_memory_bytes;
}

Result<std::string> ServerId(const Config& config, const TokenSource& random) {
  if (!config.server_id.empty()) return config.server_id;
  const Result<std::string> token = random();
  if (!token.ok()) return token;
  constexpr size_t kBytes = 8;
  return HexText(token->substr(0, kBytes));
}

EngineOptions MakeEngineOptions(const Config& config, bool gpu) {
  EngineOptions options;
  options.worker.lanes = config.lanes > 0 ? static_cast<int>(config.lanes) : gpu ? 4 : 2;
  options.worker.lane.workspace_bytes = config.lane_workspace_bytes;
  options.worker.queue_requests_max = config.max_queue;
  BatcherOptions& batcher = options.worker.batcher;
  batcher.batch_requests_max = config.max_batch_requests;
  const double gflop = config.max_batch_gflop > 0 ? config.max_batch_gflop : gpu ? 2000 : 2;
  batcher.batch_flops_max = gflop * 1e9;
  batcher.batch_bytes_max = config.max_batch_bytes;
  batcher.batch_delay = std::chrono::microseconds(config.max_batch_delay_us);
  options.worker.aging = std::chrono::milliseconds(config.priority_aging_ms);
  options.tenants = config.tenants;
  options.memory_budget_bytes = config.memory_budget_bytes;
  if (config.max_request_gflop >= 0) options.request_cost_max = config.max_request_gflop * 1e9;
  options.staging.bytes_max = config.staging_max_bytes;
  options.staging.bytes_min = config.staging_min_bytes;
  // The transport's loops need most of the cores.
  options.completion_threads = std::clamp(Processors() / 4, 1, 4);
  options.checker.sample = config.check_sample;
  options.checker.seed = config.check_seed;
  // A sampled check is skipped if no thread is free, so that it never delays a client for long. If
  // all answers are to be checked, none is skipped.
  if (config.check_sample < 1) options.checker.backlog_max = config.check_threads;
  options.checker.places_max = config.max_checks;
  options.checker.threads = static_cast<int>(config.check_threads);
  return options;
}

ChunkedOptions MakeChunkedOptions(const Config& config) {
  return {config.chunked_streams_max, ChunkBytesMax(config.max_request_bytes),
          Seconds(config.chunked_idle_timeout_seconds)};
}

int64_t MemoryMost(const Config& config, std::span<const DeviceInfo> devices) {
  constexpr int64_t kOpenCallBytes = int64_t{56} << 10;  // of a call with 7 KiB of metadata
  int64_t sessions = 0;
  int64_t dumped = 0;  // session keys copied for a dump
  for (const DeviceInfo& device : devices) {
    const int64_t bytes = SessionBytes(config, device);
    if (device.kind == DeviceKind::kCpu) sessions += bytes;
    if (!config.check_dump_dir.empty()) {
      dumped = std::max(dumped, std::min(bytes, thresholds::kCheckedKeysBytesMax));
    }
  }
  if (config.session_memory_bytes > 0) sessions += SessionTableBytes(config);
  const int64_t oip_files =
      config.oip_shared_memory.empty()
          ? 0
          : config.oip_shared_memory_bytes * std::ssize(config.tenants.list());
  // With --tokens as much again: a displaced region may still be held by its tenant.
  const int64_t regions =
      config.shared_memory ? config.shared_memory_max_bytes * (config.tokens.empty() ? 1 : 2) : 0;
  return config.memory_budget_bytes + config.message_memory_max_bytes + regions + oip_files +
         sessions + config.check_threads * dumped + MaxCalls(config) * kOpenCallBytes;
}

Duration WriteTimeout(const Config& config) { return Seconds(config.write_timeout_seconds); }

// Half for messages that are held, so that a backlog leaves room for new messages, and at most an
// eighth of the quota of all messages.
RequestReader::Limits MakeReaderLimits(const Config& config, const ReceiveMemory* receive_memory) {
  constexpr int64_t kShareOfQuota = 8;
  const int64_t half = receive_memory == nullptr ? 0 : receive_memory->bytes() / 2;
  const int64_t quota = config.message_memory_max_bytes;
  const int64_t held = quota == 0 ? half : std::min(half, quota / kShareOfQuota);
  return {config.max_request_bytes, config.max_request_bytes, held, config.tenants.weights()};
}

}  // namespace attend
