// SPDX-License-Identifier: Apache-2.0
//
// Settings for what is written down of calls.

#include "server/app/config_group.h"
#include "server/app/config_values.h"

namespace attend {
namespace {

std::string CheckAccessLog(std::string& path) {
  return path.empty() ? "must be the path of a file, stderr or off" : "";
}

std::string CheckEndpoint(std::string& address) {
  return address.empty() ? "" : CheckAddress(address);
}

void AddTraces(CLI::App& app, Config& c) {
  Group group(app, "Traces");
  group.Text("--otlp-endpoint", c.otlp_endpoint, "ADDR", CheckEndpoint,
             "Collector that spans of calls go to by OTLP over gRPC, without TLS: HOST:PORT, "
             "mostly port 4317, or unix:PATH. Empty: none");
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
               "Lines per second of calls that failed or were slow, and as many of the others, "
               "after a burst of 20 seconds' worth; the rest is counted. 0: no limit");
  AddTraces(app, c);
}

}  // namespace attend
