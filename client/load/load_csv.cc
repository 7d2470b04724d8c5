// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load as CSV.

#include "client/load/load_stats.h"
#include "client/load/report_text.h"

namespace attend::client {
namespace {

// A field of CSV.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// What every line of a CSV file says of the run: its last columns. Programs may read columns by
// their place, so a new one follows the last.
constexpr char kRunColumns[] =
    ",due,due_never_sent,latency_share,windows,stable,shape,dtype,seed,method,transport,arrivals,"
    "search_p99_ms,search_rate_per_s,warmup_s,started,host,tool_version,server,server_version,"
    "server_devices,command,schema\n";
constexpr char kSchema[] = "attend-load-csv/1";

std::string RunFields(const LoadOptions& options, const std::optional<FoundRate>& found) {
  std::string shapes, dtypes;
  for (const CallSpec& spec : options.mix) {
    const std::string dtype(DTypeName(spec.dtype));
    shapes += (shapes.empty() ? "" : ";") + spec.text;
    // Each once; "float16" is also the end of "bfloat16".
    if ((";" + dtypes + ";").find(";" + dtype + ";") == std::string::npos) {
      dtypes += (dtypes.empty() ? "" : ";") + dtype;
    }
  }
  std::string out = "," + Quoted(shapes) + "," + dtypes;
  Append(&out, ",%llu,%s,%s,%s", static_cast<unsigned long long>(options.seed), MethodName(options),
         TransportName(options), ArrivalsName(options));
  out += ",";
  if (found) Append(&out, "%.9g", found->p99_ms);
  out += ",";
  if (found && found->rate_per_s > 0) Append(&out, "%.9g", found->rate_per_s);
  Append(&out, ",%.9g", options.warmup_s);
  std::string devices;
  for (const DeviceFacts& device : options.facts.server.devices) {
    devices += (devices.empty() ? "" : ";") + device.description;
  }
  for (const std::string& text :
       {options.facts.started, options.facts.host.name, options.facts.tool_version,
        options.client.server, options.facts.server.version, devices, options.facts.command}) {
    out += "," + Quoted(text);
  }
  return out + "," + kSchema + "\n";
}

}  // namespace

std::string LoadCsv(const LoadOptions& options, const std::vector<LoadResult>& results,
                    const std::optional<FoundRate>& found) {
  std::string out =
      "mode,concurrency,rate_per_s,connections,elapsed_s,sent,ok,unexpected,unanswered,"
      "requests_per_s,bytes_in_per_s,bytes_out_per_s,flops_per_s";
  for (const char* kind : {"intended", "sent"}) {
    for (const char* name : {"p50", "p90", "p99", "p999", "max"}) {
      Append(&out, ",%s_%s_ms", kind, name);
    }
  }
  for (const char* name : kPhaseNames) {
    for (const char* figure : {"mean", "p50", "p99"}) Append(&out, ",%s_%s_ms", name, figure);
  }
  out += ",verified_passed,verified_failed,verified_skipped,checked_passed,checked_failed";
  out += kRunColumns;
  for (const LoadResult& r : results) {
    const auto number = [&out](int64_t n) { Append(&out, ",%lld", static_cast<long long>(n)); };
    const auto real = [&out](double x) { Append(&out, ",%.9g", x); };
    out += r.step.open() ? "open" : "closed";
    number(r.step.concurrency);
    real(r.step.rate_per_s);
    number(options.client.connections);
    real(r.elapsed_s);
    number(r.stats.sent);
    number(r.stats.ok());
    number(r.stats.unexpected);
    number(r.unanswered);
    real(r.requests_per_s());
    real(r.per_s(r.stats.window_bytes_in));
    real(r.per_s(r.stats.window_bytes_out));
    real(r.per_s(r.stats.window_flops));
    for (const Histogram* h : {&r.stats.from_intended, &r.stats.from_sent}) {
      if (h->count() == 0) {
        out.append(kQuantiles.size() + 1, ',');
        continue;
      }
      for (const double quantile : kQuantiles) real(Ms(h->ValueAt(quantile)));
      real(Ms(h->max()));
    }
    for (const Histogram& h : r.stats.phases) {
      real(h.mean() * 1e-6);
      real(Ms(h.ValueAt(0.5)));
      real(Ms(h.ValueAt(0.99)));
    }
    number(r.verified.passed);
    number(r.verified.failed);
    number(r.verified.skipped);
    number(r.stats.checks_passed);
    number(r.stats.checks_failed);
    number(r.due);
    number(r.due_unsent);
    real(r.latency_share());
    number(static_cast<int64_t>(r.windows.size()));
    out += !options.stability ? "," : r.stable ? ",true" : ",false";
    out += RunFields(options, found);
  }
  return out;
}

}  // namespace attend::client
