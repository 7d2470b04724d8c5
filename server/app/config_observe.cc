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
             "Collector to which spans of calls are exported by OTLP over gRPC: https://HOST:PORT "
             "with TLS, HOST:PORT or unix:PATH without; usually port 4317. Empty: none");
  group.Text("--otlp-tls-ca", c.otlp_tls_ca, "FILE", nullptr,
             "Authorities that sign the collector's certificate, in PEM; reloaded on SIGHUP. "
             "Empty: the system's");
  group.Text("--otlp-tls-cert", c.otlp_tls_cert, "FILE", nullptr,
             "Certificate to present to the collector, with its chain, in PEM; reloaded on SIGHUP. "
             "Empty: none");
  group.Text("--otlp-tls-key", c.otlp_tls_key, "FILE", nullptr,
             "Private key of --otlp-tls-cert, in PEM");
  group.Number("--otlp-sample", c.otlp_sample, 0, 1, "P",
               "Fraction of calls without a traceparent that get spans; a traceparent decides for "
               "its own call");
}

}  // namespace

void AddObserving(CLI::App& app, Config& c) {
  Group group(app, "Access log");
  group.Text("--access-log", c.access_log, "PATH", CheckAccessLog,
             "Append a line of JSON for each call to this file, which is reopened on SIGHUP; or "
             "stderr, or off");
  group.Number("--access-log-sample", c.access_log_sample, 0, 1, "P",
               "Fraction of calls that get a line; all that failed or were slow do");
  group.Number("--access-log-slow", c.access_log_slow_seconds, 0, 86400, "SECONDS",
               "Seconds above which a call counts as slow");
  group.Number("--access-log-rate", c.access_log_rate, 0, 1e6, "N",
               "Lines per second for calls that failed or were slow, as many for all others, and "
               "as many for refused callers, after a burst of 20 seconds' worth; further lines are "
               "only counted. 0: no limit, except 50 for refused callers");
  AddTraces(app, c);
}

void CheckObserving(const Config& c) {
  const bool tls = c.otlp_endpoint.starts_with("https://");
  const std::string endpoint = "an --otlp-endpoint that begins with https://";
  CheckNeeds("--otlp-tls-ca", !c.otlp_tls_ca.empty(), tls, endpoint);
  CheckNeeds("--otlp-tls-cert", !c.otlp_tls_cert.empty(), tls, endpoint);
  CheckPair("--otlp-tls-cert", c.otlp_tls_cert, "--otlp-tls-key", c.otlp_tls_key);
}

}  // namespace attend
