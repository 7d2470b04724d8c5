// SPDX-License-Identifier: Apache-2.0
//
// The gRPC server of the service: its options and its connections.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
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
  // For so long may a thread that answers calls stand still before a restart is advised: far longer
  // than calls wait on a server that has too much to do.
  static constexpr int kUnansweredSecondsMax = 30;

  // Returns a server of these methods, which reads large messages into `blocks`. `changed` is
  // called on a thread of its own when accepting() has changed. The arguments must outlive the
  // server.
  static Result<std::unique_ptr<GrpcServer>> Start(const Config& config, CallMethods& methods,
                                                   BlockPool& blocks, ConnectionHolds& connections,
                                                   Metrics& metrics, Logger& logger,
                                                   const Clock& clock,
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
  // For how long a thread that answers calls has stood still.
  int unanswered_seconds() const;
  bool answers() const { return unanswered_seconds() < kUnansweredSecondsMax; }

  // Removes the Unix sockets' files, so that no client connects to a process that ends.
  void RemoveSockets();

  // As configured, with the port that was bound.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  GrpcServer() = default;
  Status Listen(const Config& config);
  Status ListenUnix(const Config& config, const std::string& address);
  Status Serve(const Config& config, CallMethods& methods, BlockPool& blocks, const Clock& clock);

  std::unique_ptr<Intake> intake_;  // the transport's connections use it until they end
  ConnectionLimits limits_;
  std::vector<UniqueFd> sockets_;  // listening
  std::vector<UnixListener> unix_;
  std::vector<std::string> addresses_;
  std::unique_ptr<Http2Transport> transport_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace attend
