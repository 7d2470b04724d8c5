// SPDX-License-Identifier: Apache-2.0
//
// The figures of a session load as a table, as JSON and as a chart.

#include "client/load/report_text.h"
#include "client/load/run_json.h"
#include "client/load/session_load.h"

namespace attend::client {
namespace {

using nlohmann::ordered_json;

void AppendLatency(std::string* out, const char* what, const Histogram& h) {
  if (h.count() == 0) return Append(out, "  %-8s %10s %10s %10s\n", what, "-", "-", "-");
  Append(out, "  %-8s %10.3f %10.3f %10.3f\n", what, Ms(h.ValueAt(0.5)), Ms(h.ValueAt(0.99)),
         Ms(h.max()));
}

// The fields of the spec that sessions use.
std::string ShapeWords(const CallSpec& spec) {
  std::string out;
  Append(&out, "H%lld,Hkv%lld,D%lld,Dv%lld,dtype=%s", static_cast<long long>(spec.heads_q),
         static_cast<long long>(spec.heads_kv), static_cast<long long>(spec.dim),
         static_cast<long long>(spec.dim_v), std::string(DTypeName(spec.dtype)).c_str());
  if (spec.tree > 0) Append(&out, ",tree=%lld", static_cast<long long>(spec.tree));
  return out;
}

ordered_json StepJson(const SessionLoadResult& result) {
  const SessionLoadStats& stats = result.stats;
  ordered_json json = {{"sessions", result.sessions},
                       {"interrupted", result.interrupted},
                       {"sessions_made", stats.sessions},
                       {"forks", stats.forks},
                       {"prompts", stats.prompts},
                       {"prompts_per_s", result.prompts_per_s()},
                       {"tokens", stats.tokens},
                       {"tokens_per_s", result.tokens_per_s()},
                       {"bytes_sent_per_token", result.bytes_in_per_token()},
                       {"bytes_received_per_token", result.bytes_out_per_token()},
                       {"unexpected", stats.unexpected}};
  for (const auto& [code, count] : stats.failures) {
    json["failures"][std::string(CodeName(code))] = count;
  }
  json["prompt_ms"] = LatencyJson(stats.prompt_ns);
  json["step_ms"] = LatencyJson(stats.step_ns);
  json["client_verification"] = VerifiedJson(result.verified);
  return json;
}

}  // namespace

std::string SessionLoadTable(const LoadOptions& options, const SessionLoadResult& result) {
  const SessionLoad& load = options.session;
  const SessionLoadStats& stats = result.stats;
  std::string out;
  Append(&out,
         "%lld sequences at once, prompts of %lld tokens, %lld steps, %d layer%s, seed %llu%s\n",
         static_cast<long long>(result.sessions), static_cast<long long>(load.context),
         static_cast<long long>(load.decode), load.layers, load.layers == 1 ? "" : "s",
         static_cast<unsigned long long>(options.seed), result.interrupted ? " (interrupted)" : "");
  out += "  " + ShapeWords(options.mix.front()) + "\n";
  Append(&out, "  prompts %lld, %.2f/s; tokens %lld, %.1f/s%s\n",
         static_cast<long long>(stats.prompts), result.prompts_per_s(),
         static_cast<long long>(stats.tokens), result.tokens_per_s(),
         options.stream ? " over streams" : "");
  Append(&out, "  bytes for each token: %.0f sent, %.0f received\n", result.bytes_in_per_token(),
         result.bytes_out_per_token());
  Append(&out, "  sessions %lld, forks among them %lld\n", static_cast<long long>(stats.sessions),
         static_cast<long long>(stats.forks));
  Append(&out, "  %-8s %10s %10s %10s\n", "ms", "p50", "p99", "max");
  AppendLatency(&out, "prompt", stats.prompt_ns);
  AppendLatency(&out, "step", stats.step_ns);
  for (const auto& [code, count] : stats.failures) {
    Append(&out, "  sequences ended by %s: %lld, the first: ", std::string(CodeName(code)).c_str(),
           static_cast<long long>(count));
    out += Printable(stats.first_message.at(code)) + "\n";
  }
  if (options.verify_share > 0) AppendVerified(&out, result.verified);
  return out;
}

std::string SessionLoadJson(const LoadOptions& options,
                            const std::vector<SessionLoadResult>& results) {
  const SessionLoad& load = options.session;
  ordered_json json = FactsJson("attend-load-sessions/1", options.facts);
  json["server"] = options.client.server;
  json["connections"] = options.client.connections;
  json["method"] = MethodName(options);
  json["seed"] = options.seed;
  json["shape"] = ShapeWords(options.mix.front());
  json["context"] = load.context;
  json["decode"] = load.decode;
  json["layers"] = load.layers;
  json["fork_share"] = load.fork_share;
  json["think_ms"] = load.think_ms;
  json["verify_share"] = options.verify_share;
  json["steps"] = ordered_json::array();
  for (const SessionLoadResult& result : results) json["steps"].push_back(StepJson(result));
  return JsonText(json);
}

Figure SessionLoadFigure(const LoadOptions& options,
                         const std::vector<SessionLoadResult>& results) {
  LineChart tokens{"Tokens decoded", "sessions at once", "tokens/s", true, false, {}};
  LineChart steps{"Time of a step", "sessions at once", "ms, all layers", true, true, {}};
  tokens.series = {{"tokens/s", {}}};
  steps.series = {{"p50", {}}, {"p99", {}}};
  for (const SessionLoadResult& result : results) {
    const auto sessions = static_cast<double>(result.sessions);
    for (LineChart* const chart : {&tokens, &steps}) chart->x_ticks.push_back(sessions);
    tokens.series[0].points.push_back({sessions, result.tokens_per_s()});
    steps.series[0].points.push_back({sessions, Ms(result.stats.step_ns.ValueAt(0.5))});
    steps.series[1].points.push_back({sessions, Ms(result.stats.step_ns.ValueAt(0.99))});
  }
  std::string setting;
  Append(&setting, "prompts of %lld tokens, %d layer%s, %s, %s",
         static_cast<long long>(options.session.context), options.session.layers,
         options.session.layers == 1 ? "" : "s",
         options.stream ? "steps over streams" : "steps as calls", options.facts.started.c_str());
  return {
      "attend-client load --sessions", {ShapeWords(options.mix.front()), setting}, {tokens, steps}};
}

}  // namespace attend::client
