// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load as JSON; client/load/README.md documents the fields.

#include "client/load/load_stats.h"
#include "client/load/report_text.h"
#include "client/load/run_json.h"

namespace attend::client {
namespace {

using nlohmann::ordered_json;

// Buckets per doubling in the files: at most 12.5 % wide.
constexpr int kBucketsPerDoubling = 8;

ordered_json HistogramJson(const Histogram& h) {
  ordered_json json = {{"lower", ordered_json::array()},
                       {"upper", ordered_json::array()},
                       {"count", ordered_json::array()}};
  for (const Histogram::Bucket& bucket : h.Buckets(kBucketsPerDoubling)) {
    json["lower"].push_back(Ms(bucket.lower));
    json["upper"].push_back(Ms(bucket.upper));
    json["count"].push_back(bucket.count);
  }
  return json;
}

// JSON has no infinity.
ordered_json Finite(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

void AddWindows(const LoadResult& r, const std::optional<StabilityRule>& rule, ordered_json* json) {
  (*json)["windows"] = ordered_json::array();
  for (size_t i = 0; i < r.windows.size(); ++i) {
    const WindowResult& window = r.windows[i];
    (*json)["windows"].push_back({{"start_s", window.start_s},
                                  {"elapsed_s", window.elapsed_s},
                                  {"reported", static_cast<int64_t>(i) >= r.first_reported},
                                  {"requests_per_s", window.requests_per_s()},
                                  {"latency_from_intended_ms", LatencyJson(window.latency)}});
  }
  if (!rule) return;
  (*json)["stability"] = {{"stable", r.stable},
                          {"requests_per_s_spread_percent", Finite(r.spread.rate_percent)},
                          {"latency_spread_percent", Finite(r.spread.latency_percent)}};
}

void AddRates(const LoadResult& r, ordered_json* json) {
  if (r.step.open()) {
    (*json)["mode"] = "open";
    (*json)["rate_per_s"] = r.step.rate_per_s;
  } else {
    (*json)["mode"] = "closed";
    (*json)["concurrency"] = r.step.concurrency;
  }
  (*json)["elapsed_s"] = r.elapsed_s;
  (*json)["interrupted"] = r.interrupted;
  (*json)["requests_per_s"] = r.requests_per_s();
  (*json)["bytes_in_per_s"] = r.per_s(r.stats.window_bytes_in);
  (*json)["bytes_out_per_s"] = r.per_s(r.stats.window_bytes_out);
  (*json)["flops_per_s"] = r.per_s(r.stats.window_flops);
}

ordered_json StepJson(const LoadResult& r, const std::optional<StabilityRule>& rule) {
  ordered_json json;
  AddRates(r, &json);
  json["due"] = r.due;
  json["due_never_sent"] = r.due_unsent;
  json["sent"] = r.stats.sent;
  json["unexpected"] = r.stats.unexpected;
  json["unexpected_in_earlier_windows"] = r.earlier.unexpected;
  json["unanswered"] = r.unanswered;
  json["held_back"] = r.stats.held_back;
  json["retries"] = r.stats.retries;
  json["servers"] = ordered_json::array();
  for (const auto& [id, calls] : r.stats.servers) {
    json["servers"].push_back(
        {{"id", id}, {"address", calls.address}, {"answered", calls.answered}, {"ok", calls.ok}});
  }
  for (const auto& [code, count] : r.stats.by_code) {
    json["status"][std::string(CodeName(code))] = count;
  }
  json["latency_share"] = r.latency_share();
  json["latency_from_intended_ms"] = LatencyJson(r.stats.from_intended);
  json["latency_from_sent_ms"] = LatencyJson(r.stats.from_sent);
  json["latency_histogram_ms"] = HistogramJson(r.stats.from_intended);
  for (int phase = 0; phase < kPhases; ++phase) {
    if (phase == kNetwork) continue;
    json["server_phase_ms"][kPhaseNames[phase]] = LatencyJson(r.stats.phases[phase]);
  }
  json["network_ms"] = LatencyJson(r.stats.phases[kNetwork]);
  const int64_t ok = r.stats.ok();
  json["batch_requests_mean"] = ok == 0 ? 0.0 : r.stats.batch_requests / static_cast<double>(ok);
  AddWindows(r, rule, &json);
  json["client_verification"] = VerifiedJson(r.verified);
  json["server_check"] = {{"passed", r.stats.checks_passed},
                          {"failed", r.stats.checks_failed},
                          {"undecided", r.stats.checks_undecided},
                          {"first_failure", r.stats.first_check_failure}};
  return json;
}

ordered_json OptionsJson(const LoadOptions& options) {
  ordered_json json = {{"duration_s", options.duration_s},
                       {"count", options.count},
                       {"pool", options.pool},
                       {"max_outstanding", options.outstanding_max},
                       {"grace_s", options.grace_s},
                       {"verify_share", options.verify_share},
                       {"check_share", options.check_share},
                       {"deadline_ms", options.deadline_ms},
                       {"deadline_share", options.deadline_share},
                       {"cancel_share", options.cancel_share},
                       {"cancel_after_ms", options.cancel_after_ms},
                       {"discard_output", options.discard_output},
                       {"tenant", options.tenant}};
  if (!options.stability) return json;
  json["stability_percentage"] = options.stability->percent;
  json["percentile"] = options.stability->percentile;
  json["max_trials"] = options.stability->windows_max;
  return json;
}

}  // namespace

std::string LoadJson(const LoadOptions& options, const std::vector<LoadResult>& results,
                     const std::optional<FoundRate>& found) {
  ordered_json json = FactsJson("attend-load/1", options.facts);
  json["server"] = options.client.server;
  json["connections"] = options.client.connections;
  json["method"] = MethodName(options);
  json["transport"] = TransportName(options);
  json["arrivals"] = ArrivalsName(options);
  json["seed"] = options.seed;
  json["warmup_s"] = options.warmup_s;
  json["options"] = OptionsJson(options);
  for (const CallSpec& spec : options.mix) json["shapes"].push_back(ShapeJson(spec));
  if (found) {
    json["search"] = {{"p99_ms", found->p99_ms}, {"finished", found->finished}};
    json["search"]["rate_per_s"] =
        found->rate_per_s > 0 ? ordered_json(found->rate_per_s) : ordered_json();
  }
  json["steps"] = ordered_json::array();
  for (const LoadResult& result : results) {
    json["steps"].push_back(StepJson(result, options.stability));
  }
  return JsonText(json);
}

}  // namespace attend::client
