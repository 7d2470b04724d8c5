// SPDX-License-Identifier: Apache-2.0
//
// The whole server from its configuration: devices, engine, services, gRPC and metrics endpoints.
// Made, drained and destroyed by one thread (main's or a test's).

#pragma once

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <spdlog/logger.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "server/chunked_registry.h"
#include "server/clock.h"
#include "server/config.h"
#include "server/copy_pool.h"
#include "server/dump.h"
#include "server/engine.h"
#include "server/intake.h"
#include "server/metrics.h"
#include "server/service.h"
#include "server/shared_memory.h"

namespace attend {

// The devices that `config` names.
Result<std::vector<std::unique_ptr<Backend>>> MakeBackends(const Config& config,
                                                           spdlog::logger& logger);

class Server {
 public:
  // Serving when it returns. `backends` must not be empty. Messages arrive in `receive_blocks`, if
  // there are any; they outlive the server. What waits or idles does so by `clock`.
  static Result<std::unique_ptr<Server>> Start(
      const Config& config, std::vector<std::unique_ptr<Backend>> backends,
      std::shared_ptr<spdlog::logger> logger, const ReceiveBlocks& receive_blocks = {},
      std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>());
  ~Server();  // cancels the calls that there are
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Health turns to NOT_SERVING, new work is refused with UNAVAILABLE, and what was accepted has
  // `timeout` to be answered. True if all of it was. Refusing goes on until the end of the process
  // or this object: gRPC's own shutdown would cancel calls that come meanwhile, and a client cannot
  // tell from CANCELLED that it may try elsewhere.
  bool Drain(Duration timeout);

  // As given, with the port that was bound.
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::string& metrics_address() const { return metrics_address_; }  // empty: none
  // Writes the addresses to `path` as JSON; the file appears whole.
  Status WriteReadyFile(const std::string& path) const;

  Engine& engine() { return *engine_; }
  const SharedMemoryServer* shared_memory() const { return shared_.get(); }  // null: off

 private:
  Server(const Config& config, std::shared_ptr<spdlog::logger> logger,
         std::shared_ptr<const Clock> clock);
  Status MakeEngine(std::vector<std::unique_ptr<Backend>> backends,
                    const ReceiveBlocks& receive_blocks);
  void LockReceiveMemory(const ReceiveBlocks& blocks);
  Status StartMetrics();
  Status StartGrpc();
  void LogStart() const;
  // Tells grpc.health.v1 whether new work is taken: not while draining, nor without a device.
  void UpdateHealth();
  bool WaitForCalls(TimePoint until) const;

  const Config config_;
  const std::shared_ptr<spdlog::logger> logger_;
  const std::shared_ptr<const Clock> shared_clock_;
  const Clock& clock_ = *shared_clock_;
  const TimePoint started_ = clock_.Now();
  Metrics metrics_;
  std::unique_ptr<Dumper> dumper_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ReceiveMemory> receive_memory_;  // null: messages are copied
  std::unique_ptr<CopyPool> copies_;
  std::unique_ptr<ChunkedRegistry> chunked_;
  std::unique_ptr<SharedMemoryServer> shared_;  // null if off
  std::unique_ptr<Intake> intake_;
  std::unique_ptr<ServiceContext> context_;
  std::unique_ptr<AttentionServiceImpl> service_;
  std::unique_ptr<grpc::Server> grpc_;
  std::mutex health_mutex_;
  grpc::HealthCheckServiceInterface* health_ = nullptr;  // grpc_'s, while it serves
  std::shared_ptr<prometheus::Collectable> refresh_;
  std::shared_ptr<prometheus::Collectable> gpu_stats_;
  std::shared_ptr<prometheus::Collectable> shared_stats_;
  std::shared_ptr<prometheus::Collectable> staging_stats_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::vector<std::string> addresses_;
  std::string metrics_address_;
};

}  // namespace attend
