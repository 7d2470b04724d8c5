// SPDX-License-Identifier: Apache-2.0
//
// Settings for the access log and traces.

#include <string>
#include <utility>

#include "server/app/config_group.h"
#include "server/app/config_values.h"

namespace attend {
namespace {

std::string CheckAccessLog(std::string& path) {
  return path.empty() ? "must be the path of a file, stderr or off" : "";
}

void AddTraces(CLI::App& app, Config& c) {
  Group group(app, "Traces");
  group.Text("--otlp-endpoint", c.otlp_endpoint, "ADDR", CheckCollector,
             "Collector that spans of calls go to by OTLP over gRPC: https://HOST:PORT over TLS, "
             "HOST:PORT or unix:PATH without; mostly port 4317. Empty: none");
  group.Text("--otlp-tls-ca", c.otlp_tls_ca, "FILE", nullptr,
             "Authorities that the collector's certificate must be of, in PEM; read again on "
             "SIGHUP. Empty: the system's");
  group.Text("--otlp-tls-cert", c.otlp_tls_cert, "FILE", nullptr,
             "Certificate to show to the collector, with its chain, in PEM; read again on SIGHUP. "
             "Empty: none");
  group.Text("--otlp-tls-key", c.otlp_tls_key, "FILE", nullptr,
             "Private key of --otlp-tls-cert, in PEM");
  group.Number("--otlp-sample", c.otlp_sample, 0, 1, "P",
               "Share of calls that have spans, of those without a traceparent; one with it says "
               "itself");
}

}  // namespace

void AddObserving(CLI::App& app, Config& c) {
  Group group(app, "Access log");
  group.Text("--access-log", c.access_log, "PATH", CheckAccessLog,
             "Append a line of JSON for each call to this file, and reopen it on SIGHUP; or "
             "stderr, or off");
  group.Number("--access-log-sample", c.access_log_sample, 0, 1, "P",
               "Share of calls that get a line; those that failed or were slow all do");
  group.Number("--access-log-slow", c.access_log_slow_seconds, 0, 86400, "SECONDS",
               "Seconds beyond which a call was slow");
  group.Number("--access-log-rate", c.access_log_rate, 0, 1e6, "N",
               "Lines per second of calls that failed or were slow, as many of the others, and of "
               "refused callers, after a burst of 20 seconds' worth; the rest is counted. 0: no "
               "limit but 50 for refused callers");
  AddTraces(app, c);
}

void CheckObserving(const Config& c) {
  const auto needs = [](const std::string& given, const char* flag, bool other, const char* what) {
    if (!given.empty() && !other) throw CLI::ValidationError(flag, what);
  };
  const bool tls = c.otlp_endpoint.starts_with("https://");
  for (const auto& [path, flag] : {std::pair(&c.otlp_tls_ca, "--otlp-tls-ca"),
                                   std::pair(&c.otlp_tls_cert, "--otlp-tls-cert")}) {
    needs(*path, flag, tls, "needs an --otlp-endpoint that begins with https://");
  }
  needs(c.otlp_tls_cert, "--otlp-tls-cert", !c.otlp_tls_key.empty(), "needs --otlp-tls-key");
  needs(c.otlp_tls_key, "--otlp-tls-key", !c.otlp_tls_cert.empty(), "needs --otlp-tls-cert");
}

}  // namespace attend
