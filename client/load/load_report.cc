// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load as a table.

#include "client/load/load_stats.h"
#include "client/load/report_text.h"
#include "kernels/util/counted.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

double GBPerSecond(const LoadResult& r) {
  return r.per_s(r.stats.window_bytes_in + r.stats.window_bytes_out) * 1e-9;
}

void AppendLatencies(std::string* out, const Histogram& h) {
  if (h.count() == 0) {  // no answers, as opposed to answers in 0 ms
    for (size_t n = 0; n <= kQuantiles.size(); ++n) Append(out, " %10s", "-");
    return;
  }
  for (const double quantile : kQuantiles) Append(out, " %10.3f", Ms(h.ValueAt(quantile)));
  Append(out, " %10.3f", Ms(h.max()));
}

void AppendStepRow(std::string* out, const LoadResult& r) {
  Append(out, "%-16s %10.1f %8.3f %8.4f", StepName(r.step).c_str(), r.requests_per_s(),
         GBPerSecond(r), r.per_s(r.stats.window_flops) * 1e-12);
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
        std::pair{", UNEXPECTED IN EARLIER WINDOWS ", r.earlier.unexpected},
        std::pair{", DUE, NEVER SENT ", r.due_unsent}, std::pair{", retries ", r.stats.retries},
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
    *out += "    first " + std::string(CodeName(code)) + ": " + Printable(message) + "\n";
  }
}

void AppendServers(std::string* out, const LoadResult& r) {
  const auto& servers = r.stats.servers;
  if (servers.empty() || servers.begin()->second.address.empty()) return;  // only one
  *out += "  by server:";
  for (const auto& [id, calls] : servers) {
    Append(out, "%s %s (%s) %lld", &id == &servers.begin()->first ? "" : ",",
           Printable(calls.address).c_str(), Printable(id).c_str(),
           static_cast<long long>(calls.answered));
    if (calls.answered > calls.ok) {
      Append(out, ", of which failed %lld", static_cast<long long>(calls.answered - calls.ok));
    }
  }
  *out += "\n";
}

void AppendStability(std::string* out, const LoadResult& r, const StabilityRule& rule) {
  const auto windows = static_cast<long long>(r.windows.size());
  if (r.stable) {
    Append(out, "  stable after %lld windows", windows);
  } else {
    Append(out, "  NOT STABLE after %lld windows, asked for %g %%", windows, rule.percent);
  }
  if (std::isinf(r.spread.rate_percent)) {
    *out += ": fewer than three in a row had answers\n";
    return;
  }
  Append(out, ": in the last three, requests/s within %.1f %% of their mean, p%g within %.1f %%\n",
         r.spread.rate_percent, rule.percentile, r.spread.latency_percent);
}

void AppendPhases(std::string* out, const LoadResult& r) {
  const int64_t ok = r.stats.ok();
  if (ok == 0) return;
  Append(out, "  phases, ms    %10s %10s %10s     requests in a batch: mean %.2f\n", "mean", "p50",
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
  const int64_t judged = r.stats.checks_passed + r.stats.checks_failed;
  if (options.check_share > 0 || judged + r.stats.checks_undecided > 0) {
    Append(out, "  checked by the server: passed %lld, FAILED %lld, could not be judged %lld\n",
           static_cast<long long>(r.stats.checks_passed),
           static_cast<long long>(r.stats.checks_failed),
           static_cast<long long>(r.stats.checks_undecided));
    if (r.stats.checks_failed > 0) {
      *out += "    first failure: " + Printable(r.stats.first_check_failure) + "\n";
    }
  }
}

}  // namespace

std::string LoadTable(const LoadOptions& options, const std::vector<LoadResult>& results) {
  std::string out;
  Append(&out, "%s, %s, seed %llu; rates count answers inside the measurement\n",
         Counted(options.client.connections, "connection").c_str(), MethodName(options),
         static_cast<unsigned long long>(options.seed));
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
    AppendServers(&out, result);
    if (options.stability) AppendStability(&out, result, *options.stability);
    AppendPhases(&out, result);
    AppendChecks(&out, options, result);
  }
  return out;
}

}  // namespace attend::client
