// SPDX-License-Identifier: Apache-2.0
//
// /metrics over HTTP: one thread, a bounded number of connections, each with one request. A new
// connection beyond the bound replaces the one that has been open longest, so that no client can
// keep a scrape out.

#pragma once

#include <prometheus/collectable.h>

#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

class MetricsEndpoint {
 public:
  // Collected in this order, on the endpoint's thread.
  using Collectables = std::vector<std::shared_ptr<prometheus::Collectable>>;
  static constexpr int kConnectionsMax = 32;

  // Serves at `address`, HOST:PORT, from the return on.
  static Result<std::unique_ptr<MetricsEndpoint>> Start(const std::string& address,
                                                        Collectables collectables);
  ~MetricsEndpoint();
  MetricsEndpoint(const MetricsEndpoint&) = delete;
  MetricsEndpoint& operator=(const MetricsEndpoint&) = delete;

  int port() const { return port_; }

 private:
  struct Connection {
    UniqueFd socket;
    TimePoint since;
    std::string request;
    std::string answer;  // empty until the request is whole
    size_t sent = 0;
  };
  using Connections = std::list<Connection>;  // by arrival

  explicit MetricsEndpoint(Collectables collectables) : collectables_(std::move(collectables)) {}
  void Run();
  int WaitMs() const;
  void Accept(int listener);
  // False if the connection is over.
  bool Serve(Connection& connection) const;
  bool Read(Connection& connection) const;
  bool Write(Connection& connection) const;
  std::string Answer(const std::string& request) const;
  std::string Collect() const;

  const Collectables collectables_;
  const SteadyClock clock_;
  std::vector<UniqueFd> listeners_;
  int port_ = 0;
  UniqueFd wake_;
  UniqueFd spare_;  // closed for one connection if the process has no descriptors left
  Connections connections_;
  TimePoint rest_until_{};  // no connection is accepted before this
  std::thread thread_;
};

}  // namespace attend
