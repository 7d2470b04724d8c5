// SPDX-License-Identifier: Apache-2.0

#include "server/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <prometheus/registry.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "server/byte_size.h"
#include "server/gpu_stats.h"
#include "server/info.h"
#include "server/options.h"
#include "server/staging_stats.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// What a message may hold beside the tensors that --max-request-bytes is meant for.
constexpr int64_t kMessageMarginBytes = int64_t{64} << 10;
constexpr Duration kMemoryReturnTimeout = seconds(5);
constexpr Duration kLastBytesReadTime = milliseconds(250);

// Sets the gauges that nobody sets when they change. Gives no families of its own.
class GaugeRefresh final : public prometheus::Collectable {
 public:
  GaugeRefresh(Engine& engine, Metrics& metrics) : engine_(engine), metrics_(metrics) {}
  std::vector<prometheus::MetricFamily> Collect() const override {
    HostPool& pool = engine_.host_pool();
    metrics_.SetHostMemory(pool.used_bytes(), pool.largest_free_bytes(), pool.budget_bytes());
    // Set on every change too, but the last of two changes at once may not be the last to be set.
    metrics_.SetInflight(engine_.inflight());
    const std::vector<Engine::DeviceState> devices = engine_.Devices();
    for (size_t i = 0; i < devices.size(); ++i) {
      metrics_.SetOutstanding(static_cast<int>(i), devices[i].outstanding_batches);
      metrics_.SetDeviceMemory(static_cast<int>(i), devices[i].memory);
    }
    return {};
  }

 private:
  Engine& engine_;
  Metrics& metrics_;
};

// "host:0" with the port that was bound.
std::string WithPort(const std::string& address, int port) {
  if (address.starts_with("unix:")) return address;
  return address.substr(0, address.rfind(':') + 1) + std::to_string(port);
}

std::string CongestionControl() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string name;
  file >> name;
  return name.empty() ? "unknown" : name;
}

std::string Join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

void SetGrpcOptions(const Config& config, grpc::ServerBuilder& builder) {
  const int64_t receive_max = std::min<int64_t>(config.max_request_bytes + kMessageMarginBytes,
                                                INT_MAX - kMessageMarginBytes);
  builder.SetMaxReceiveMessageSize(static_cast<int>(receive_max));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(config.max_streams));
  // Two servers on one port would share its connections; the second must fail instead.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // An inflated message's size is bounded only after inflating. Nor does compressing tensors pay.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  if (config.grpc_memory_max_bytes > 0) {
    grpc::ResourceQuota quota("attend");
    quota.Resize(static_cast<size_t>(config.grpc_memory_max_bytes));
    builder.SetResourceQuota(quota);
  }
  // Only reflection is served by gRPC's own threads.
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
}

}  // namespace

Result<std::vector<std::unique_ptr<Backend>>> MakeBackends(const Config& config,
                                                           spdlog::logger& logger) {
  std::string why;
  std::vector<std::string> names;
  if (config.device == "auto" || config.device == "cuda:all") {
    const int gpus = CudaDeviceCount(&why);
    for (int i = 0; i < gpus; ++i) names.push_back("cuda:" + std::to_string(i));
    if (gpus == 0 && config.device == "cuda:all") {
      return Status(Code::kNotFound, "device cuda:all: " + why);
    }
    if (gpus == 0) {
      logger.info("no GPU: {}; serving on the CPU", why);
      names.push_back("cpu");
    }
  } else {
    for (size_t at = 0; at <= config.device.size();) {
      const size_t end = std::min(config.device.find(',', at), config.device.size());
      names.push_back(config.device.substr(at, end - at));
      at = end + 1;
    }
  }
  BackendOptions options;
  options.cpu_threads = static_cast<int>(config.cpu_threads);
  std::vector<std::unique_ptr<Backend>> backends;
  for (const std::string& name : names) {
    Result<std::unique_ptr<Backend>> backend = MakeBackend(name, options);
    if (!backend.ok()) return backend.status();
    backends.push_back(std::move(*backend));
  }
  return backends;
}

Server::Server(const Config& config, std::shared_ptr<spdlog::logger> logger,
               std::shared_ptr<const Clock> clock)
    : config_(config),
      logger_(std::move(logger)),
      shared_clock_(std::move(clock)),
      metrics_(Version()) {}

Result<std::unique_ptr<Server>> Server::Start(const Config& config,
                                              std::vector<std::unique_ptr<Backend>> backends,
                                              std::shared_ptr<spdlog::logger> logger,
                                              const ReceiveBlocks& receive_blocks,
                                              std::shared_ptr<const Clock> clock) {
  std::unique_ptr<Server> server(new Server(config, std::move(logger), std::move(clock)));
  ATTEND_RETURN_IF_ERROR(server->MakeEngine(std::move(backends), receive_blocks));
  ATTEND_RETURN_IF_ERROR(server->StartMetrics());
  ATTEND_RETURN_IF_ERROR(server->StartGrpc());
  server->LogStart();
  return server;
}

Status Server::MakeEngine(std::vector<std::unique_ptr<Backend>> backends,
                          const ReceiveBlocks& receive_blocks) {
  bool gpu = false;
  for (const auto& backend : backends) gpu |= backend->info().kind == DeviceKind::kCuda;
  Result<std::unique_ptr<Engine>> engine =
      Engine::Make(std::move(backends), MakeEngineOptions(config_, gpu), metrics_, clock_);
  if (!engine.ok()) return engine.status();
  engine_ = std::move(*engine);
  if (!config_.check_dump_dir.empty()) {
    dumper_ = std::make_unique<Dumper>(config_.check_dump_dir, config_.check_dump_max,
                                       config_.check_seed, *logger_);
  }
  engine_->OnCheckFailed([this](const Request& request) {
    logger_->error("reference check failed id={} request_id={} kernel={} device={}: {}", request.id,
                   request.request_id, KernelName(request.selection.kernel), request.device_name,
                   request.report->detail);
    if (dumper_ != nullptr) dumper_->Write(request);
  });
  engine_->OnDeviceLost([this](const DeviceInfo& device) {
    logger_->error("device {} is lost", device.name);
    UpdateHealth();
  });
  if (config_.shared_memory) {
    Result<std::unique_ptr<SharedMemoryServer>> shared =
        SharedMemoryServer::Start(config_, *engine_, engine_->host_allocator(), *logger_);
    if (!shared.ok()) return shared.status();
    shared_ = std::move(*shared);
  }
  LockReceiveMemory(receive_blocks);
  copies_ = std::make_unique<CopyPool>(CopyThreads(config_));
  intake_ = std::make_unique<Intake>(
      *engine_, *copies_, metrics_, clock_,
      Intake::Limits{
          config_.max_request_bytes, config_.max_request_bytes,
          HeldBytesMax(config_, receive_memory_ == nullptr ? 0 : receive_memory_->bytes())},
      shared_ == nullptr ? nullptr : &shared_->registry(), receive_memory_.get());
  chunked_ = std::make_unique<ChunkedRegistry>(MakeChunkedOptions(config_), clock_, RandomToken);
  context_ = std::unique_ptr<ServiceContext>(new ServiceContext{
      *engine_, *intake_, metrics_, *copies_, *chunked_, clock_, *logger_,
      config_.stream_requests_max, [this](v1::GetServerInfoResponse* response) {
        FillServerInfo(*engine_, config_, shared_.get(), clock_.Now() - started_, response);
      }});
  service_ = std::make_unique<AttentionServiceImpl>(*context_);
  return Status();
}

void Server::LockReceiveMemory(const ReceiveBlocks& blocks) {
  if (config_.receive_memory_bytes == 0) return;
  const std::vector<Backend*> backends = engine_->backends();
  const bool wanted = std::any_of(backends.begin(), backends.end(),
                                  [](const Backend* backend) { return backend->Gathers(); });
  if (!wanted) return;
  Result<std::unique_ptr<ReceiveMemory>> locked =
      ReceiveMemory::Lock(engine_->host_allocator(), blocks);
  if (!locked.ok()) {
    logger_->warn("messages are copied, as their memory is not page-locked: {}",
                  locked.status().message());
    return;
  }
  receive_memory_ = std::move(*locked);
}

Status Server::StartMetrics() {
  if (config_.metrics_listen == "off") return Status();
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(config_.metrics_listen);
  } catch (const std::exception& error) {
    return Unavailable("metrics-listen " + config_.metrics_listen +
                       " cannot be bound: " + error.what());
  }
  std::vector<std::string> devices;
  for (const Engine::DeviceState& state : engine_->Devices()) devices.push_back(state.info.name);
  refresh_ = std::make_shared<GaugeRefresh>(*engine_, metrics_);
  gpu_stats_ = std::make_shared<GpuStats>(devices);
  staging_stats_ = std::make_shared<StagingStats>(engine_->staging());
  shared_stats_ =
      std::make_shared<SharedMemoryStats>(shared_ == nullptr ? nullptr : &shared_->registry());
  exposer_->RegisterCollectable(refresh_);  // before the registry: collected in this order
  exposer_->RegisterCollectable(metrics_.registry());
  exposer_->RegisterCollectable(gpu_stats_);
  exposer_->RegisterCollectable(shared_stats_);
  exposer_->RegisterCollectable(staging_stats_);
  metrics_address_ = WithPort(config_.metrics_listen, exposer_->GetListeningPorts().front());
  return Status();
}

Status Server::StartGrpc() {
  // Holds the library for the life of the process: its shutdown can wait 10 s for a poller.
  [[maybe_unused]] static const bool held = (grpc_init(), true);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetGrpcOptions(config_, builder);
  std::vector<int> ports(config_.listen.size(), 0);
  for (size_t i = 0; i < config_.listen.size(); ++i) {
    builder.AddListeningPort(config_.listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(service_.get());
  grpc_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports.size(); ++i) {
    if (grpc_ != nullptr && ports[i] > 0) continue;
    // gRPC stops at the first address that fails, so the last one tried is it.
    if (grpc_ == nullptr && i + 1 < ports.size() && ports[i] > 0) continue;
    return Unavailable("listen " + config_.listen[i] + " cannot be bound");
  }
  for (size_t i = 0; i < ports.size(); ++i) {
    addresses_.push_back(WithPort(config_.listen[i], ports[i]));
  }
  {
    const std::lock_guard lock(health_mutex_);
    health_ = grpc_->GetHealthCheckService();
    health_->SetServingStatus(v1::AttentionService::service_full_name(), true);
  }
  UpdateHealth();  // a call may have lost the device by now
  return Status();
}

void Server::UpdateHealth() {
  const std::lock_guard lock(health_mutex_);
  if (health_ != nullptr) health_->SetServingStatus(!engine_->draining() && engine_->healthy());
}

void Server::LogStart() const {
  logger_->info("{}", VersionText());
  for (const Engine::DeviceState& state : engine_->Devices()) {
    logger_->info("device {}: {}, {} units, {} lanes, {} memory", state.info.name,
                  state.info.description, state.info.units, state.lanes,
                  FormatByteSize(state.info.memory_bytes));
  }
  std::vector<std::string> kernels;
  for (const KernelInfo& kernel : Kernels()) {
    for (const Engine::DeviceState& state : engine_->Devices()) {
      if (state.info.kind != kernel.device) continue;
      kernels.emplace_back(kernel.name);
      break;
    }
  }
  logger_->info("kernels: {}", Join(kernels));
  logger_->info(
      "limits: message {}, memory {}, queue {} requests, batch {} requests, stream {} requests, "
      "{} calls a connection, chunked requests {} streams and {} s idle, reference check {}",
      FormatByteSize(config_.max_request_bytes), FormatByteSize(config_.memory_budget_bytes),
      config_.max_queue, config_.max_batch_requests, config_.stream_requests_max,
      config_.max_streams, config_.chunked_streams_max, config_.chunked_idle_timeout_seconds,
      config_.reference_check);
  std::vector<std::string> tenants;
  for (const Tenant& tenant : config_.tenants.list()) {
    tenants.push_back(tenant.name + "=" + std::to_string(tenant.weight));
  }
  logger_->info("tenants: {}; priorities age after {} ms", Join(tenants),
                config_.priority_aging_ms);
  logger_->info("tcp congestion control: {}; allocator tuning: {}; page-locked receive memory: {}",
                CongestionControl(), config_.allocator_tuning ? "on" : "off",
                FormatByteSize(receive_memory_ == nullptr ? 0 : receive_memory_->bytes()));
  logger_->info("shared memory: {}; CUDA IPC: {}",
                shared_ == nullptr ? "off" : "on " + shared_->socket_path(),
                shared_ != nullptr && shared_->cuda_ipc() ? "on" : "off");
  logger_->info("serving gRPC on {}; metrics on {}", Join(addresses_),
                metrics_address_.empty() ? "nothing" : "http://" + metrics_address_ + "/metrics");
}

Status Server::WriteReadyFile(const std::string& path) const {
  const nlohmann::ordered_json json = {
      {"pid", getpid()}, {"listen", addresses_}, {"metrics", metrics_address_}};
  const std::string partial = path + ".partial";
  std::ofstream file(partial);
  file << json.dump() << "\n";
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
    return Internal("ready-file " + path + " cannot be written");
  }
  return Status();
}

bool Server::WaitForCalls(TimePoint until) const {
  while (context_->admitted_calls.load(std::memory_order_acquire) > 0) {
    if (clock_.Now() >= until) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

bool Server::Drain(Duration timeout) {
  const TimePoint until = clock_.Now() + timeout;
  // In this order: whoever has seen NOT_SERVING is refused.
  engine_->Drain();
  UpdateHealth();
  logger_->info("draining: {} requests to finish", engine_->inflight());
  service_->EndStreams();
  if (shared_ != nullptr && !shared_->Stop(until)) {
    logger_->error("drain timed out while a shared region was being made");
    return false;
  }
  if (!engine_->WaitIdle(until)) {
    logger_->error("drain timed out with {} requests and {} parts of uploads unfinished",
                   engine_->inflight(), engine_->upload_parts());
    return false;
  }
  // Every answer exists; give gRPC the time to send them.
  const bool sent = WaitForCalls(until);
  if (!sent) logger_->error("drain timed out with answers that no client has read");
  // The last bytes lie in the kernel's buffers. A process that ends while a client still sends
  // resets the connection and takes them along, so clients get a moment to read; late calls are
  // refused.
  const Duration left = std::max(Duration::zero(), until - clock_.Now());
  std::this_thread::sleep_for(std::min<Duration>(kLastBytesReadTime, left));
  for (const std::string& address : addresses_) {
    if (address.starts_with("unix:")) unlink(address.c_str() + 5);
  }
  if (sent) logger_->info("drained");
  return sent;
}

Server::~Server() {
  exposer_.reset();
  if (engine_ == nullptr) return;
  engine_->Drain();
  {
    const std::lock_guard lock(health_mutex_);
    health_ = nullptr;
  }
  if (grpc_ != nullptr) {
    grpc_->Shutdown(std::chrono::system_clock::now());
    grpc_->Wait();
    grpc_.reset();
  }
  copies_.reset();
  engine_->Stop();
  chunked_.reset();  // its thread too may be the last to hold a request
  shared_.reset();   // no request is left; before the engine, whose backend locked the pages
  // gRPC may hold answers a little longer than their calls; their memory is the pool's.
  const TimePoint until = clock_.Now() + kMemoryReturnTimeout;
  while (engine_->host_pool().used_bytes() > 0 && clock_.Now() < until) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (engine_->host_pool().used_bytes() > 0) {
    logger_->error("gRPC still holds {} bytes of answers; their memory stays taken",
                   engine_->host_pool().used_bytes());
    (void)engine_.release();
  }
}

}  // namespace attend
