// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load as a table, JSON and CSV.

#include <nlohmann/json.hpp>

#include "client/load/load_stats.h"
#include "client/load/report_text.h"

namespace attend::client {
namespace {

using nlohmann::ordered_json;

double PerSecond(const LoadResult& r, double amount) {
  return r.elapsed_s > 0 ? amount / r.elapsed_s : 0;
}

double GBPerSecond(const LoadResult& r) {
  return PerSecond(r, r.stats.window_bytes_in + r.stats.window_bytes_out) * 1e-9;
}

std::string StepName(const LoadStep& step) {
  return step.open() ? "open " + RateText(step.rate_per_s) + "/s"
                     : "closed x" + std::to_string(step.concurrency);
}

int64_t CountOf(const LoadStats& stats, Code code) {
  const auto found = stats.by_code.find(code);
  return found == stats.by_code.end() ? 0 : found->second;
}

void AppendLatencies(std::string* out, const Histogram& h) {
  if (h.count() == 0) {  // no answer, which is not an answer at once
    for (size_t n = 0; n <= kQuantiles.size(); ++n) Append(out, " %10s", "-");
    return;
  }
  for (const double quantile : kQuantiles) Append(out, " %10.3f", Ms(h.ValueAt(quantile)));
  Append(out, " %10.3f", Ms(h.max()));
}

void AppendStepRow(std::string* out, const LoadResult& r) {
  Append(out, "%-16s %10.1f %8.3f %8.4f", StepName(r.step).c_str(), r.requests_per_s(),
         GBPerSecond(r), PerSecond(r, r.stats.window_flops) * 1e-12);
  if (r.step.open()) {
    AppendLatencies(out, r.stats.from_intended);
    Append(out, "  from the intended send\n%-16s %10s %8s %8s", "", "", "", "");
  }
  AppendLatencies(out, r.stats.from_sent);
  *out += r.step.open() ? "  from the actual send\n" : "\n";
}

void AppendOutcomes(std::string* out, const LoadResult& r) {
  Append(out, "  measured %.2f s%s, requests answered %lld:", r.elapsed_s,
         r.interrupted ? " (interrupted)" : "", static_cast<long long>(r.stats.sent));
  for (const auto& [code, count] : r.stats.by_code) {
    Append(out, " %s %lld", std::string(CodeName(code)).c_str(), static_cast<long long>(count));
  }
  for (const auto& [what, count] :
       {std::pair{", unanswered at the end ", r.unanswered},
        std::pair{", UNEXPECTED ", r.stats.unexpected},
        std::pair{", DUE, NEVER SENT ", r.due_unsent},
        std::pair{", sent late as --max-outstanding were unanswered ", r.stats.held_back}}) {
    if (count > 0) *out += what + std::to_string(count);
  }
  *out += "\n";
  if (r.latency_share() < 1) {
    Append(out, "  latencies are those of %lld of the %lld requests that were due, %.3g %%\n",
           static_cast<long long>(r.stats.from_intended.count()), static_cast<long long>(r.due),
           100 * r.latency_share());
  }
  for (const auto& [code, message] : r.stats.first_message) {
    *out += "    first " + std::string(CodeName(code)) + ": " + message + "\n";
  }
}

void AppendPhases(std::string* out, const LoadResult& r) {
  const int64_t ok = CountOf(r.stats, Code::kOk);
  if (ok == 0) return;
  Append(out, "  server, ms    %10s %10s %10s     requests in a batch: mean %.2f\n", "mean", "p50",
         "p99", r.stats.batch_requests / static_cast<double>(ok));
  for (int phase = 0; phase < kPhases; ++phase) {
    const Histogram& h = r.stats.phases[phase];
    if (h.max() == 0) continue;
    Append(out, "    %-11s %10.3f %10.3f %10.3f\n", kPhaseNames[phase], h.mean() * 1e-6,
           Ms(h.ValueAt(0.5)), Ms(h.ValueAt(0.99)));
  }
}

void AppendChecks(std::string* out, const LoadOptions& options, const LoadResult& r) {
  if (options.verify_share > 0) AppendVerified(out, r.verified);
  if (options.check_share > 0 || r.stats.checks_passed + r.stats.checks_failed > 0) {
    Append(out, "  checked by the server: passed %lld, FAILED %lld\n",
           static_cast<long long>(r.stats.checks_passed),
           static_cast<long long>(r.stats.checks_failed));
    if (r.stats.checks_failed > 0) {
      *out += "    first failure: " + r.stats.first_check_failure + "\n";
    }
  }
}

const char* ArrivalsName(const LoadOptions& options) {
  return options.arrivals == Arrivals::kPoisson ? "poisson" : "constant";
}

const char* TransportName(const LoadOptions& options) {
  if (!options.shared_memory_socket.empty()) return options.device_memory ? "cuda-ipc" : "shm";
  if (options.stream || options.transport == CallTransport::kInline) return "inline";
  return options.transport == CallTransport::kChunked ? "chunked" : "auto";
}

// A field of CSV.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// What every line of a CSV file says of the run: its last columns.
constexpr char kRunColumns[] =
    ",due,due_never_sent,latency_share,shape,dtype,seed,method,transport,arrivals,search_p99_ms,"
    "search_rate_per_s\n";

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
  Append(&out, ",%llu,%s,%s,%s", static_cast<unsigned long long>(options.seed),
         options.stream ? "AttendStream" : "Attend", TransportName(options), ArrivalsName(options));
  if (!found) return out + ",,\n";
  Append(&out, ",%.9g,", found->p99_ms);
  if (found->rate_per_s > 0) Append(&out, "%.9g", found->rate_per_s);
  return out + "\n";
}

ordered_json StepJson(const LoadResult& r) {
  ordered_json json;
  if (r.step.open()) {
    json["mode"] = "open";
    json["rate_per_s"] = r.step.rate_per_s;
  } else {
    json["mode"] = "closed";
    json["concurrency"] = r.step.concurrency;
  }
  json["elapsed_s"] = r.elapsed_s;
  json["interrupted"] = r.interrupted;
  json["requests_per_s"] = r.requests_per_s();
  json["bytes_in_per_s"] = PerSecond(r, r.stats.window_bytes_in);
  json["bytes_out_per_s"] = PerSecond(r, r.stats.window_bytes_out);
  json["flops_per_s"] = PerSecond(r, r.stats.window_flops);
  json["due"] = r.due;
  json["due_never_sent"] = r.due_unsent;
  json["sent"] = r.stats.sent;
  json["unexpected"] = r.stats.unexpected;
  json["unanswered"] = r.unanswered;
  json["held_back"] = r.stats.held_back;
  for (const auto& [code, count] : r.stats.by_code) {
    json["status"][std::string(CodeName(code))] = count;
  }
  json["latency_share"] = r.latency_share();
  json["latency_from_intended_ms"] = LatencyJson(r.stats.from_intended);
  json["latency_from_sent_ms"] = LatencyJson(r.stats.from_sent);
  for (int phase = 0; phase < kPhases; ++phase) {
    json["server_phase_ms"][kPhaseNames[phase]] = LatencyJson(r.stats.phases[phase]);
  }
  const int64_t ok = CountOf(r.stats, Code::kOk);
  json["batch_requests_mean"] = ok == 0 ? 0.0 : r.stats.batch_requests / static_cast<double>(ok);
  json["client_verification"] = VerifiedJson(r.verified);
  json["server_check"] = {{"passed", r.stats.checks_passed},
                          {"failed", r.stats.checks_failed},
                          {"first_failure", r.stats.first_check_failure}};
  return json;
}

}  // namespace

std::string LoadTable(const LoadOptions& options, const std::vector<LoadResult>& results) {
  std::string out;
  Append(&out, "%d connection%s, %s, seed %llu; rates count answers inside the measurement\n",
         options.client.connections, options.client.connections == 1 ? "" : "s",
         options.stream ? "AttendStream" : "Attend", static_cast<unsigned long long>(options.seed));
  for (const CallSpec& spec : options.mix) {
    out += "  " + spec.text;
    if (options.mix.size() > 1) Append(&out, " (weight %g)", spec.weight);
    out += "\n";
  }
  Append(&out, "%-16s %10s %8s %8s", "", "req/s", "GB/s", "TFLOP/s");
  for (const char* name : kQuantileNames) Append(&out, " %7s ms", name);
  Append(&out, " %10s\n", "max ms");
  for (const LoadResult& result : results) AppendStepRow(&out, result);
  for (const LoadResult& result : results) {
    out += StepName(result.step) + "\n";
    AppendOutcomes(&out, result);
    AppendPhases(&out, result);
    AppendChecks(&out, options, result);
  }
  return out;
}

std::string LoadJson(const LoadOptions& options, const std::vector<LoadResult>& results,
                     const std::optional<FoundRate>& found) {
  ordered_json json;
  json["server"] = options.client.server;
  json["connections"] = options.client.connections;
  json["method"] = options.stream ? "AttendStream" : "Attend";
  json["transport"] = TransportName(options);
  json["arrivals"] = ArrivalsName(options);
  json["seed"] = options.seed;
  json["warmup_s"] = options.warmup_s;
  for (const CallSpec& spec : options.mix) {
    json["shapes"].push_back({{"shape", spec.text}, {"weight", spec.weight}});
  }
  if (found) {
    json["search"] = {{"p99_ms", found->p99_ms}, {"finished", found->finished}};
    json["search"]["rate_per_s"] =
        found->rate_per_s > 0 ? ordered_json(found->rate_per_s) : ordered_json();
  }
  json["steps"] = ordered_json::array();
  for (const LoadResult& result : results) json["steps"].push_back(StepJson(result));
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

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
    number(CountOf(r.stats, Code::kOk));
    number(r.stats.unexpected);
    number(r.unanswered);
    real(r.requests_per_s());
    real(PerSecond(r, r.stats.window_bytes_in));
    real(PerSecond(r, r.stats.window_bytes_out));
    real(PerSecond(r, r.stats.window_flops));
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
    out += RunFields(options, found);
  }
  return out;
}

}  // namespace attend::client
