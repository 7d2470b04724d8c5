// SPDX-License-Identifier: Apache-2.0
//
// gRPC around the service: its options, the connections that it is given, health and reflection.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/net/connection_limits.h"
#include "server/net/listener.h"
#include "server/net/read_guard.h"
#include "server/regions/unix_listener.h"
#include "server/rpc/reflection.h"
#include "server/util/clock.h"

namespace attend {

class GrpcServer {
 public:
  // Serving `service` when it returns; for grpc.health.v1 not yet. Calls of methods that there are
  // not go to `unknown`. `changed` is called when accepting() has changed, by a thread of its own.
  // All that is given outlives it.
  static Result<std::unique_ptr<GrpcServer>> Start(const Config& config,
                                                   std::span<grpc::Service* const> services,
                                                   grpc::CallbackGenericService& unknown,
                                                   Metrics& metrics, Logger& logger,
                                                   const Clock& clock,
                                                   std::function<void()> changed);
  ~GrpcServer();  // cancels the calls that there are
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // What grpc.health.v1 answers. From any thread, as what follows.
  void SetServing(bool serving);
  bool accepting() const { return listener_->accepting(); }
  int64_t CountConnections() { return listener_->CountOpen(); }
  const ConnectionLimits& limits() const { return limits_; }

  // Removes the Unix sockets' files: nobody new shall come to a process that ends.
  void RemoveSockets();

  // As given, with the port that was bound.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  GrpcServer(Metrics& metrics, Logger& logger) : metrics_(metrics), logger_(logger) {}
  // Of a connection that is ended for what it sent.
  void LogWrong(int socket, const char* what);
  Status Listen(const Config& config);
  Status ListenUnix(const Config& config, const std::string& address);

  Metrics& metrics_;
  Logger& logger_;
  const ReadGuard::OnWrong on_wrong_ = [this](int socket, const char* what) {
    LogWrong(socket, what);
  };
  ConnectionLimits limits_;
  std::vector<UniqueFd> sockets_;  // that listen
  std::vector<UnixListener> unix_;
  std::vector<std::string> addresses_;
  ReflectionService reflection_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace attend
