// SPDX-License-Identifier: Apache-2.0
//
// /metrics, /healthz and /readyz over HTTP, optionally with TLS: one thread, a bounded number of
// connections, one request each. A new connection beyond the bound replaces the oldest one of the
// address that has most, so that no address can block another's scrape, neither by connections that
// stay open nor by a flood of new ones.

#pragma once

#include <prometheus/metric_family.h>

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/auth/authenticator.h"
#include "server/http/http_connection.h"
#include "server/log/logging.h"
#include "server/metrics/tls_metrics.h"
#include "server/tls/tls_certificates.h"
#include "server/util/unique_fd.h"

namespace attend {

class MetricsEndpoint {
 public:
  // Called in this order at each scrape, on the endpoint's thread.
  using Collectors = std::vector<std::function<std::vector<prometheus::MetricFamily>()>>;
  static constexpr int kConnectionsMax = 32;

  struct Options {
    std::string address;  // HOST:PORT
    bool loopback_only = false;
    MetricsTlsFiles tls = {};
    // A file of callers (server/auth): those with the scope info may read /metrics. Empty: anyone
    // may.
    std::string auth_file = {};
    std::vector<std::string> tenants = {"default"};  // that auth_file may name
    std::function<bool()> ready;                     // for /readyz; on the endpoint's thread
    // For /healthz, likewise: a line that names the fault, or null.
    std::function<const char*()> ailment;
  };

  // Serves once this returns. Files are reloaded when they change. `tls_metrics` and `logger` must
  // outlive the endpoint.
  static Result<std::unique_ptr<MetricsEndpoint>> Start(Options options, Collectors collectors,
                                                        TlsMetrics& tls_metrics, Logger& logger);
  ~MetricsEndpoint();
  MetricsEndpoint(const MetricsEndpoint&) = delete;
  MetricsEndpoint& operator=(const MetricsEndpoint&) = delete;

  int port() const { return port_; }

 private:
  MetricsEndpoint(Options options, Collectors collectors, TlsMetrics& tls_metrics, Logger& logger)
      : options_(std::move(options)),
        collectors_(std::move(collectors)),
        tls_metrics_(tls_metrics),
        logger_(logger) {}
  Status ReadCertificates();
  Status ReadCallers();
  Status Listen();
  void Run();
  int WaitMs() const;
  void Accept(int listener);
  void Add(UniqueFd socket);
  // Closes the oldest connection of the address that has most.
  void MakeRoom();
  HttpAnswer Answer(const HttpRequest& request);
  HttpAnswer AnswerMetrics(const HttpRequest& request);
  Code Allow(const HttpRequest& request) const;
  std::string Collect() const;
  void LogReload(const Status& status);

  const Options options_;
  const Collectors collectors_;
  TlsMetrics& tls_metrics_;
  Logger& logger_;
  const SteadyClock clock_;
  std::unique_ptr<TlsCertificates> certificates_;  // null: plaintext
  std::unique_ptr<Authenticator> authenticator_;   // null: anyone may scrape
  std::vector<UniqueFd> listeners_;
  int port_ = 0;
  UniqueFd wake_;
  UniqueFd spare_;  // closed to accept one connection when no descriptors are left
  struct Open {
    HttpConnection http;
    std::string peer;  // see PeerOf
  };
  std::list<Open> connections_;  // by arrival
  TimePoint rest_until_{};       // no accepts before this
  std::thread thread_;
};

}  // namespace attend
