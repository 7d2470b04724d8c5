// SPDX-License-Identifier: Apache-2.0
//
// /metrics, /healthz and /readyz over HTTP, with TLS or without: one thread, a bounded number of
// connections, each with one request. A new connection beyond the bound replaces the one that has
// been open longest, of the address that has most of them: so no address can keep another's scrape
// out, neither with connections that stay nor with ever new ones.

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
    // Callers (server/auth), of whom those with the scope info may read /metrics. Empty: everybody.
    std::string auth_file = {};
    std::vector<std::string> tenants = {"default"};  // that auth_file may name
    std::function<bool()> ready;                     // for /readyz, on the endpoint's thread
    // For /healthz, likewise: a line that says what is wrong, or null.
    std::function<const char*()> ailment;
  };

  // Serves from the return on. Files are read again when they change. `tls_metrics` and `logger`
  // must outlive the endpoint.
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
  // Ends a connection of the address that has most; the oldest of them.
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
  std::unique_ptr<TlsCertificates> certificates_;  // null: without TLS
  std::unique_ptr<Authenticator> authenticator_;   // null: everybody may scrape
  std::vector<UniqueFd> listeners_;
  int port_ = 0;
  UniqueFd wake_;
  UniqueFd spare_;  // closed for one connection if the process has no descriptors left
  struct Open {
    HttpConnection http;
    std::string peer;  // PeerOf
  };
  std::list<Open> connections_;  // by arrival
  TimePoint rest_until_{};       // no connection is accepted before this
  std::thread thread_;
};

}  // namespace attend
