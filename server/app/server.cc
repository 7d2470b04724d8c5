// SPDX-License-Identifier: Apache-2.0
//
// Start order follows dependencies: engine, shared memory and sessions, the services, the metrics
// endpoint, and the listening sockets last, so that no call meets a half-built server. The
// destructor (server_end.cc) stops whatever has threads from the outside in. Health and metrics
// reach the gRPC server through serving_, under its mutex: they run before it is set and after it
// is cleared.

#include "server/app/server.h"

#include <prometheus/registry.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "server/app/collectors.h"
#include "server/app/gpu_stats.h"
#include "server/app/info.h"
#include "server/app/limits_file.h"
#include "server/app/observing.h"
#include "server/app/oip_options.h"
#include "server/app/options.h"
#include "server/app/process_stats.h"
#include "server/app/server_parts.h"
#include "server/app/start_lines.h"
#include "server/app/unix_address.h"
#include "server/net/tcp_listener.h"
#include "server/rpc/chunked_transfer.h"
#include "server/util/assign.h"
#include "server/util/whole_file.h"

namespace attend {

Server::Server(const Config& config, std::shared_ptr<Logger> logger,
               std::shared_ptr<const Clock> clock)
    : config_(config),
      logger_(std::move(logger)),
      shared_clock_(std::move(clock)),
      metrics_(Version()),
      limits_(MakeTenantBounds(config), clock_) {
  if (config_.limits_file.empty()) return;
  reloads_.Add("limits", [this] {
    const Result<std::vector<TenantBounds>> read = ReadLimits(config_.limits_file, config_.tenants);
    if (read.ok()) limits_.Set(*read);
    return read.status();
  });
}

Result<std::unique_ptr<Server>> Server::Start(const Config& config,
                                              std::vector<std::unique_ptr<Backend>> backends,
                                              std::shared_ptr<Logger> logger,
                                              std::shared_ptr<const Clock> clock) {
  Config named = config;
  ATTEND_RETURN_IF_ERROR(Assign(named.server_id, ServerId(config, RandomToken)));
  std::unique_ptr<Server> server(new Server(named, std::move(logger), std::move(clock)));
  ATTEND_RETURN_IF_ERROR(
      Assign(server->callers_, Callers::Load(server->config_, server->metrics_, *server->logger_)));
  ATTEND_RETURN_IF_ERROR(server->StartObserving());
  ATTEND_RETURN_IF_ERROR(server->MakeEngine(std::move(backends)));
  ATTEND_RETURN_IF_ERROR(server->StartMetrics());
  ATTEND_RETURN_IF_ERROR(server->StartGrpc());
  if (server->callers_ != nullptr) {
    server->callers_->Watch(server->clock_, [raw = server.get()] {
      raw->context_->streams.RecheckAll();
      if (raw->shared_ != nullptr) raw->shared_->Recheck();
      raw->connections_.Recheck(raw->callers_->authenticator().credentials());
      raw->grpc_->FindStrangers();
    });
  }
  server->LogStart();
  return server;
}

Status Server::MakeEngine(std::vector<std::unique_ptr<Backend>> backends) {
  bool gpu = false;
  for (const auto& backend : backends) gpu |= backend->info().kind == DeviceKind::kCuda;
  ATTEND_RETURN_IF_ERROR(
      Assign(engine_,
             Engine::Make(std::move(backends), MakeEngineOptions(config_, gpu), metrics_, clock_)));
  if (!config_.check_dump_dir.empty()) {
    dumper_ = std::make_unique<Dumper>(MakeDumperOptions(config_), clock_, *logger_);
  }
  engine_->OnCheckFailed([this](const Request& request) {
    logger_->Log(LogLevel::err, "reference check failed",
                 {{"id", request.id},
                  {"request_id", request.request_id},
                  {"tenant", config_.tenants.list()[request.tenant].name},
                  {"transport", TransportName(request.transport)},
                  {"kernel", KernelName(request.selection.kernel)},
                  {"device", request.device_name},
                  {"detail", request.report->detail}});
    if (dumper_ != nullptr) dumper_->Write(request);
  });
  engine_->OnDeviceLost([this](const DeviceInfo& device) {
    logger_->Log(LogLevel::err, "device lost", {{"device", device.name}}, device.name);
    if (session_memory_ != nullptr) EndSessionsOf(device);
    UpdateHealth();
  });
  if (config_.shared_memory) {
    SharedMemoryOptions options = MakeSharedMemoryOptions(config_);
    options.limits.tenants = options.socket.limits = &limits_;
    if (callers_ != nullptr) callers_->Guard(options.socket);
    ATTEND_RETURN_IF_ERROR(
        Assign(shared_, SharedMemoryServer::Start(options, engine_->backends(),
                                                  engine_->host_allocator(), *logger_, clock_)));
  }
  ATTEND_RETURN_IF_ERROR(MakeSessions());
  blocks_ = std::make_unique<BlockPool>(config_.receive_memory_bytes);
  LockReceiveMemory();
  workers_ = std::make_unique<WorkerThreads>("attend-copy", CopyThreads(config_));
  call_queue_ = std::make_unique<CallQueue>(*workers_, config_.tenants.weights(), clock_);
  reader_ = std::make_unique<RequestReader>(
      *engine_, *workers_, clock_, MakeReaderLimits(config_, receive_memory_.get()), limits_,
      shared_ == nullptr ? nullptr : &shared_->registry(), receive_memory_.get(), sessions());
  chunked_ = std::make_unique<ChunkedRegistry>(MakeChunkedOptions(config_), clock_, RandomToken);
  return MakeServices();
}

void Server::FillInfo(const Caller& caller, v1::GetServerInfoResponse* response) {
  FillServerInfo(*engine_, config_, shared_.get(), sessions(), clock_.Now() - started_, response);
  FillTenant(*engine_, limits_, caller.tenant, sessions(), response->mutable_tenant());
  LeaveOut(caller, config_, response);
}

Status Server::MakeServices() {
  if (config_.load_reports) StartLoadReports();
  context_ = std::unique_ptr<ServiceContext>(new ServiceContext{
      .engine = *engine_,
      .reader = *reader_,
      .metrics = metrics_,
      .workers = *workers_,
      .queue = *call_queue_,
      .chunked = *chunked_,
      .clock = clock_,
      .logger = *logger_,
      .limits = limits_,
      .stream_requests_max = config_.stream_requests_max,
      .fill_info = [this](const auto& caller, auto* response) { FillInfo(caller, response); },
      .authenticator = callers_ == nullptr ? nullptr : &callers_->authenticator(),
      .access_log = access_log_.get(),
      .tracer = tracer_.get(),
      .load = load_.get(),
      .server_id = config_.server_id});
  table_ = std::make_unique<CallTable>(*context_);
  AddAttention(*table_);
  session_service_ = std::make_unique<SessionServiceImpl>(*context_, sessions());
  session_service_->AddTo(*table_);
  MakeAdmin();
  admin_service_->AddTo(*table_);
  health_service_ =
      std::make_unique<HealthService>(ServiceNames(config_), /*bounded=*/callers_ != nullptr);
  health_service_->AddTo(*table_);
  if (config_.reflection) {
    reflection_ = std::make_unique<ReflectionService>(*context_, ServiceNames(config_));
    reflection_->AddTo(*table_);
  }
  if (config_.oip) {
    Result<oip::InferenceServiceImpl::Options> options = MakeOipOptions(
        config_, engine_->backends(), shared_ == nullptr ? nullptr : &shared_->registry());
    if (!options.ok()) return options.status();
    inference_service_ =
        std::make_unique<oip::InferenceServiceImpl>(*context_, std::move(*options));
    inference_service_->AddTo(*table_);
  }
  return Status();
}

Status Server::MakeSessions() {
  if (config_.session_memory_bytes == 0) return Status();
  std::vector<std::unique_ptr<DeviceArena>> arenas;
  for (Backend* const backend : engine_->backends()) {
    // Page 0 is never used, so the first slab begins one unit late.
    Result<std::unique_ptr<DeviceArena>> arena =
        backend->MakeArena(SessionBytes(config_, backend->info()) + kPageUnitBytes);
    if (!arena.ok() && !config_.session_memory_is_default) return arena.status();
    if (!arena.ok()) {
      logger_->Log(LogLevel::warn, "device has no memory for sessions",
                   {{"device", backend->info().name}, {"error", arena.status().message()}});
    }
    arenas.push_back(arena.ok() ? std::move(*arena) : nullptr);
  }
  SessionOptions options = MakeSessionOptions(config_);
  options.limits = &limits_;
  session_memory_ = std::make_unique<SessionMemory>(std::move(arenas), options, clock_);
  return Status();
}

void Server::LockReceiveMemory() {
  if (config_.receive_memory_bytes == 0) return;
  const std::vector<Backend*> backends = engine_->backends();
  const bool wanted = std::any_of(backends.begin(), backends.end(),
                                  [](const Backend* backend) { return backend->Gathers(); });
  if (!wanted) return;
  Result<std::unique_ptr<ReceiveMemory>> locked =
      ReceiveMemory::Lock(engine_->host_allocator(), blocks_->begin(), blocks_->bytes());
  if (!locked.ok()) {
    logger_->Log(LogLevel::warn, "receive memory cannot be page-locked; messages are copied",
                 {{"error", locked.status().message()}});
    return;
  }
  receive_memory_ = std::move(*locked);
}

Status Server::StartMetrics() {
  if (config_.metrics_listen == "off") return Status();
  std::vector<std::string> devices;
  for (const Engine::DeviceState& state : engine_->Devices()) devices.push_back(state.info.name);
  std::vector<std::string> tenants;
  for (const Tenant& tenant : config_.tenants.list()) tenants.push_back(tenant.name);
  const MetricsAccess access = MetricsAccessOf(config_);
  ATTEND_RETURN_IF_ERROR(Assign(
      metrics_endpoint_,
      MetricsEndpoint::Start(
          {.address = config_.metrics_listen,
           .loopback_only = access.loopback_only,
           .tls = access.tls,
           .auth_file = access.auth,
           .tenants = tenants,
           .ready = [this] { return Ready(); },
           .ailment = [this] { return Ailment(); }},
          {[this] {
             UpdateConnections();
             RefreshGauges(*engine_, metrics_, *logger_);
             return metrics_.registry()->Collect();
           },
           [process = std::make_shared<ProcessStats>()] { return process->Collect(); },
           [gpus = std::make_shared<GpuStats>(devices)] { return gpus->Collect(); },
           [this] { return SharedMemoryFamilies(shared_ ? &shared_->registry() : nullptr); },
           [this] { return DiskFamilies(dumper_.get(), *logger_); },
           [this] { return StagingFamilies(engine_->staging()); },
           [this] { return ReloadFamilies(reloads_); },
           [this] { return LimitFamilies(limits_, config_.tenants); },
           [this] { return ObservingFamilies(access_log_.get(), tracer_.get()); },
           [this, devices] { return SessionFamilies(sessions(), devices, config_.tenants); }},
          tls_metrics_, *logger_)));
  metrics_address_ = WithPort(config_.metrics_listen, metrics_endpoint_->port());
  return Status();
}

void Server::UpdateConnections() {
  const MutexLock lock(serving_mutex_);
  if (serving_ == nullptr) return;
  metrics_.SetConnections(serving_->CountConnections(), serving_->limits().connections);
  metrics_.SetUnansweredSeconds(serving_->unanswered_seconds());
}

Status Server::StartGrpc() {
  ATTEND_RETURN_IF_ERROR(
      Assign(grpc_, GrpcServer::Start(config_, *table_, *blocks_, connections_, metrics_, *logger_,
                                      clock_, [this] { UpdateHealth(); })));
  {
    const MutexLock lock(serving_mutex_);
    serving_ = grpc_.get();
  }
  UpdateHealth();  // a call may have lost the device already
  return Status();
}

void Server::EndSessionsOf(const DeviceInfo& device) {
  const std::vector<Backend*> backends = engine_->backends();
  for (size_t n = 0; n < backends.size(); ++n) {
    if (backends[n]->info().name == device.name) {
      session_memory_->table().LoseDevice(static_cast<int>(n));
    }
  }
}

void Server::UpdateHealth() {
  const MutexLock lock(serving_mutex_);
  if (serving_ != nullptr) health_service_->SetServing(ReadyLocked());
}

const std::vector<std::string>& Server::addresses() const { return grpc_->addresses(); }

SessionTable* Server::sessions() {
  return session_memory_ == nullptr ? nullptr : &session_memory_->table();
}

bool Server::Ready() {
  const MutexLock lock(serving_mutex_);
  return ReadyLocked();
}

bool Server::ReadyLocked() const {
  return serving_ != nullptr && !engine_->draining() && engine_->healthy() &&
         serving_->accepting() && serving_->answers();
}

const char* Server::Ailment() {
  if (!engine_->healthy()) return "all devices are lost\n";
  const MutexLock lock(serving_mutex_);
  return serving_ == nullptr || serving_->answers() ? nullptr
                                                    : "the server does not answer calls\n";
}

void Server::LogStart() const {
  StartFacts facts;
  facts.devices = engine_->Devices();
  facts.receive_memory_bytes = receive_memory_ == nullptr ? 0 : receive_memory_->bytes();
  if (shared_ != nullptr) {
    facts.shared_memory_socket = shared_->socket_path();
    facts.cuda_ipc = shared_->cuda_ipc();
  }
  facts.connections = grpc_->limits();
  facts.addresses = addresses();
  facts.metrics_address = metrics_address_;
  attend::LogStart(config_, facts, *logger_);
}

Status Server::WriteReadyFile(const std::string& path) const {
  const nlohmann::ordered_json json = {
      {"pid", getpid()}, {"listen", addresses()}, {"metrics", metrics_address_}};
  return WriteWholeFile("ready-file", path, json.dump() + "\n");
}

void Server::Reload() {
  reloads_.Run([this](const std::string& what, const Status& status) {
    metrics_.SetReloadFailed(what, !status.ok());
    if (status.ok()) {
      logger_->Log(LogLevel::info, "reloaded", {{"what", what}});
    } else {
      logger_->Log(LogLevel::err, "reload failed; the previous version stays in use",
                   {{"what", what}, {"error", status.message()}}, what);
    }
  });
}

}  // namespace attend
