// SPDX-License-Identifier: Apache-2.0
//
// The whole server from its configuration: devices, engine, services, gRPC and metrics endpoints.
// Made, drained and destroyed by one thread (main's or a test's).

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/mutex.h"
#include "server/app/config.h"
#include "server/app/dump.h"
#include "server/app/grpc_server.h"
#include "server/app/metrics_endpoint.h"
#include "server/engine/engine.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/regions/shared_memory_server.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/session_service.h"
#include "server/sessions/session_memory.h"
#include "server/util/clock.h"
#include "server/util/worker_threads.h"
#include "server/wire/answer_watch.h"

namespace attend {

// The devices that `config` names.
Result<std::vector<std::unique_ptr<Backend>>> MakeBackends(const Config& config, Logger& logger);

class Server {
 public:
  // Serving when it returns. `backends` must not be empty. Messages arrive in `receive_blocks`, if
  // there are any; they outlive the server. What waits or idles does so by `clock`.
  static Result<std::unique_ptr<Server>> Start(
      const Config& config, std::vector<std::unique_ptr<Backend>> backends,
      std::shared_ptr<Logger> logger, const ReceiveBlocks& receive_blocks = {},
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
  const std::vector<std::string>& addresses() const { return grpc_->addresses(); }
  const std::string& metrics_address() const { return metrics_address_; }  // empty: none
  // Writes the addresses to `path` as JSON; the file appears whole.
  Status WriteReadyFile(const std::string& path) const;

  Engine& engine() { return *engine_; }
  const SharedMemoryServer* shared_memory() const { return shared_.get(); }  // null: off

 private:
  Server(const Config& config, std::shared_ptr<Logger> logger, std::shared_ptr<const Clock> clock);
  Status MakeEngine(std::vector<std::unique_ptr<Backend>> backends,
                    const ReceiveBlocks& receive_blocks);
  void LockReceiveMemory(const ReceiveBlocks& blocks);
  Status StartMetrics();
  Status StartGrpc();
  void LogStart() const;
  // Tells grpc.health.v1 whether new work is taken: not while draining, nor without a device, nor
  // while no connection can be accepted.
  void UpdateHealth();
  // Ends what is unfinished; false if something cannot be stopped.
  bool StopRunning();
  void UpdateConnections();
  bool WaitForCalls(TimePoint until) const;

  const Config config_;
  const std::shared_ptr<Logger> logger_;
  const std::shared_ptr<const Clock> shared_clock_;
  const Clock& clock_ = *shared_clock_;
  const TimePoint started_ = clock_.Now();
  Metrics metrics_;
  std::unique_ptr<Dumper> dumper_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ReceiveMemory> receive_memory_;  // null: messages are copied
  std::unique_ptr<WorkerThreads> workers_;
  std::unique_ptr<ChunkedRegistry> chunked_;
  std::unique_ptr<AnswerWatch> answers_;
  std::unique_ptr<SharedMemoryServer> shared_;     // null if off
  std::unique_ptr<SessionMemory> session_memory_;  // null if off
  std::unique_ptr<RequestReader> reader_;
  std::unique_ptr<ServiceContext> context_;
  std::unique_ptr<AttentionServiceImpl> service_;
  std::unique_ptr<SessionServiceImpl> session_service_;
  std::unique_ptr<UnknownMethods> unknown_methods_;
  Mutex serving_mutex_;
  // grpc_ for other threads than the owner's; null before it serves and at the end.
  GrpcServer* serving_ ATTEND_GUARDED_BY(serving_mutex_) = nullptr;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<MetricsEndpoint> metrics_endpoint_;  // null if off
  std::string metrics_address_;
};

}  // namespace attend
