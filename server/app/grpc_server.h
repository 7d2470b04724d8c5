// SPDX-License-Identifier: Apache-2.0
//
// The server's listening sockets, connections and transport.

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

// Service names for health and reflection.
std::vector<std::string> ServiceNames(const Config& config);

class GrpcServer {
 public:
  // A loop that has not run for this long makes /healthz advise a restart. Far above the time that
  // calls wait on an overloaded server.
  static constexpr int kUnansweredSecondsMax = 30;

  // Starts to serve `methods`, reading large messages into `blocks`. `changed` is called on a
  // separate thread when accepting() has changed. The arguments must outlive the server.
  static Result<std::unique_ptr<GrpcServer>> Start(const Config& config, CallMethods& methods,
                                                   BlockPool& blocks, ConnectionHolds& connections,
                                                   Metrics& metrics, Logger& logger,
                                                   const Clock& clock,
                                                   std::function<void()> changed);
  ~GrpcServer();  // cancels all open calls
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Thread-safe, as are the next six.
  bool accepting() const { return listener_->accepting(); }
  int64_t CountConnections() { return listener_->CountOpen(); }
  // After a change in `connections`: its connections without a valid caller are strangers again.
  void FindStrangers() { listener_->FindStrangers(); }
  // See Http2Transport.
  void Drain() { transport_->Drain(); }
  const ConnectionLimits& limits() const { return limits_; }
  // For how long a loop of the transport has not run.
  int unanswered_seconds() const;
  // See Http2Transport. Empty if a loop has not run for long.
  std::vector<std::string> WaitingPeers() const {
    return answers() ? transport_->WaitingPeers() : std::vector<std::string>();
  }
  bool answers() const { return unanswered_seconds() < kUnansweredSecondsMax; }

  // Removes the Unix sockets' files, so that no client connects to a process that is shutting down.
  void RemoveSockets();

  // As configured, with bound ports.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  GrpcServer() = default;
  Status Listen(const Config& config);
  Status ListenUnix(const Config& config, const std::string& address);
  Status Serve(const Config& config, CallMethods& methods, BlockPool& blocks, Metrics& metrics,
               Logger& logger, const Clock& clock);

  std::unique_ptr<Intake> intake_;  // used by the transport's connections until they end
  ConnectionLimits limits_;
  std::vector<UniqueFd> sockets_;  // listening
  std::vector<UnixListener> unix_;
  std::vector<std::string> addresses_;
  std::unique_ptr<Http2Transport> transport_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace attend
