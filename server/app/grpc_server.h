// SPDX-License-Identifier: Apache-2.0
//
// The gRPC server of the service: its options and its connections.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/app/heartbeat.h"
#include "server/app/intake.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/net/connection_limits.h"
#include "server/net/listener.h"
#include "server/regions/unix_listener.h"
#include "server/transport/http2_transport.h"

namespace attend {

// The services that clients may ask about: for health and reflection.
std::vector<std::string> ServiceNames(const Config& config);

class GrpcServer {
 public:
  // Returns a server that serves `methods`. Calls of unknown methods go to `unknown`. `own`: the
  // methods of this server's own transport, which then carries all calls, and reads large messages
  // into `own_blocks`; null: gRPC's library does. `changed` is called on a thread of its own when
  // accepting() has changed. The arguments must outlive the server.
  static Result<std::unique_ptr<GrpcServer>> Start(const Config& config, grpc::Service& methods,
                                                   grpc::CallbackGenericService& unknown,
                                                   CallMethods* own, BlockPool* own_blocks,
                                                   std::shared_ptr<CallerGate> gate,
                                                   ConnectionHolds& connections, Metrics& metrics,
                                                   Logger& logger, const Clock& clock,
                                                   std::function<void()> changed);
  ~GrpcServer();  // cancels all open calls
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Thread-safe, and so are the next five.
  bool accepting() const { return listener_->accepting(); }
  int64_t CountConnections() { return listener_->CountOpen(); }
  // Of those that `connections` says are no callers' any more.
  void FindStrangers() { listener_->FindStrangers(); }
  const ConnectionLimits& limits() const { return limits_; }
  // For how long threads that answer calls have not answered the server itself.
  int unanswered_seconds() const;
  bool beats() const { return unanswered_seconds() < Heartbeat::kUnansweredSecondsMax; }

  // Removes the Unix sockets' files, so that no client connects to a process that ends.
  void RemoveSockets();

  // As configured, with the port that was bound.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  GrpcServer() = default;
  Status Listen(const Config& config);
  Status ListenUnix(const Config& config, const std::string& address);
  Status StartOwn(const Config& config, CallMethods& methods, BlockPool* blocks,
                  const Clock& clock);

  // gRPC's connections use it until they end.
  std::unique_ptr<Intake> intake_;
  ConnectionLimits limits_;
  std::vector<UniqueFd> sockets_;  // listening
  std::vector<UnixListener> unix_;
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<Http2Transport> transport_;  // null: gRPC's library carries calls
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<Heartbeat> heartbeat_;
};

}  // namespace attend
