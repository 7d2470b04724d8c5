// SPDX-License-Identifier: Apache-2.0
//
// The whole server, built from its configuration: devices, engine, services, gRPC and metrics
// endpoints. One thread (main's or a test's) makes, drains and destroys it.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/limits/connection_holds.h"
#include "server/limits/tenant_limits.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/metrics/tls_metrics.h"
#include "server/util/reload_hooks.h"

namespace attend {

// Forward declarations, so that users of this header do not compile every component.
class Accepting;
class AccessLog;
class AdminServiceImpl;
class BlockPool;
class CallQueue;
class CallTable;
class Callers;
class ChunkedRegistry;
class Dumper;
class Engine;
class GrpcServer;
class LoadMeter;
class MetricsEndpoint;
class ReceiveMemory;
class HealthService;
class ReflectionService;
class RequestReader;
class SessionMemory;
class SessionServiceImpl;
class SessionTable;
class SharedMemoryServer;
class Tracer;
class WorkerThreads;
struct Caller;
struct ServiceContext;
namespace oip {
class InferenceServiceImpl;
}
namespace v1 {
class GetServerInfoResponse;
}

class Server {
 public:
  // Returns a server that is serving. `backends` must not be empty. All timeouts use `clock`.
  static Result<std::unique_ptr<Server>> Start(
      const Config& config, std::vector<std::unique_ptr<Backend>> backends,
      std::shared_ptr<Logger> logger,
      std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>());
  ~Server();  // cancels all open calls
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Sets health to NOT_SERVING, refuses new requests with UNAVAILABLE, and waits up to `timeout`
  // for accepted requests to be answered. True if all were. New requests are refused, not
  // cancelled, until destruction: a cancellation would not tell a client to try another server.
  bool Drain(Duration timeout);
  // An operator's switch for new requests, usable until Drain. Thread-safe.
  Accepting& accepting() { return *accepting_; }

  // Reloads what can be reloaded while the server runs; logs and counts the results. A faulty file
  // is not used: the earlier state stays. One thread at a time.
  void Reload();

  // As configured, with bound ports.
  const std::vector<std::string>& addresses() const;
  const std::string& metrics_address() const { return metrics_address_; }  // empty: none
  void CountDevicesLeftOut(int devices) { metrics_.SetDevicesLeftOut(devices); }
  // Writes the addresses to `path` as JSON. The file appears complete.
  Status WriteReadyFile(const std::string& path) const;

  Engine& engine() { return *engine_; }
  const SharedMemoryServer* shared_memory() const { return shared_.get(); }  // null: off
  SessionTable* sessions();                                                  // null: off

 private:
  Server(const Config& config, std::shared_ptr<Logger> logger, std::shared_ptr<const Clock> clock);
  Status MakeEngine(std::vector<std::unique_ptr<Backend>> backends);
  // Opens the access log and the span exporter.
  Status StartObserving();
  void StartLoadReports();
  // At the end: writes and sends what is left, for at most 0.5 s.
  void FlushObserving();
  Status MakeSessions();
  Status MakeServices();
  void MakeAdmin();
  void EndSessionsOf(const DeviceInfo& device);
  void LockReceiveMemory();
  Status StartMetrics();
  Status StartGrpc();
  void LogStart() const;
  // Sets grpc.health.v1: SERVING unless the server is draining, has no healthy device, or cannot
  // accept connections.
  void UpdateHealth();
  bool Ready();
  const char* Ailment();  // a fault that a restart would fix; null: none
  bool ReadyLocked() const ATTEND_REQUIRES(serving_mutex_);
  // Ends unfinished requests. False if one cannot be stopped.
  bool StopRunning();
  void UpdateConnections();
  void FillInfo(const Caller& caller, v1::GetServerInfoResponse* response);
  bool WaitForCalls(TimePoint until) const;

  const Config config_;  // with a server_id
  const std::shared_ptr<Logger> logger_;
  const std::shared_ptr<const Clock> shared_clock_;
  const Clock& clock_ = *shared_clock_;
  const TimePoint started_ = clock_.Now();
  Metrics metrics_;
  TlsMetrics tls_metrics_{*metrics_.registry()};
  ReloadHooks reloads_;
  TenantLimits limits_;
  ConnectionHolds connections_{limits_};
  std::unique_ptr<AccessLog> access_log_;  // null if off
  std::unique_ptr<Tracer> tracer_;         // null if off
  std::unique_ptr<LoadMeter> load_;        // null if off
  std::unique_ptr<Dumper> dumper_;
  std::unique_ptr<BlockPool> blocks_;  // large messages are read into these
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ReceiveMemory> receive_memory_;  // null: messages are copied
  std::unique_ptr<WorkerThreads> workers_;
  std::unique_ptr<CallQueue> call_queue_;
  std::unique_ptr<ChunkedRegistry> chunked_;
  std::unique_ptr<SharedMemoryServer> shared_;     // null if off
  std::unique_ptr<SessionMemory> session_memory_;  // null if off
  std::unique_ptr<Callers> callers_;               // null: callers are not authenticated
  std::unique_ptr<RequestReader> reader_;
  std::unique_ptr<ServiceContext> context_;
  std::unique_ptr<CallTable> table_;
  std::unique_ptr<SessionServiceImpl> session_service_;
  std::unique_ptr<oip::InferenceServiceImpl> inference_service_;  // null if off
  std::unique_ptr<ReflectionService> reflection_;                 // null if off
  std::unique_ptr<Accepting> accepting_;
  std::unique_ptr<AdminServiceImpl> admin_service_;
  std::unique_ptr<HealthService> health_service_;
  Mutex serving_mutex_;
  // grpc_, for threads other than the owner's. Null before it serves and during destruction.
  GrpcServer* serving_ ATTEND_GUARDED_BY(serving_mutex_) = nullptr;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<MetricsEndpoint> metrics_endpoint_;  // null if off
  std::string metrics_address_;
};

}  // namespace attend
