// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load of sessions as a table and as JSON.

#include <nlohmann/json.hpp>

#include "client/load/report_text.h"
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
  return out;
}

}  // namespace

std::string SessionLoadTable(const LoadOptions& options, const SessionLoadResult& result) {
  const SessionLoad& load = options.session;
  const SessionLoadStats& stats = result.stats;
  std::string out;
  Append(&out,
         "%lld sequences at once, prompts of %lld tokens, %lld steps, %d layer%s, seed %llu%s\n",
         static_cast<long long>(load.sessions), static_cast<long long>(load.context),
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
    out += stats.first_message.at(code) + "\n";
  }
  if (options.verify_share > 0) AppendVerified(&out, result.verified);
  return out;
}

std::string SessionLoadJson(const LoadOptions& options, const SessionLoadResult& result) {
  const SessionLoad& load = options.session;
  const SessionLoadStats& stats = result.stats;
  ordered_json json = {{"server", options.client.server},
                       {"connections", options.client.connections},
                       {"method", options.stream ? "AttendStream" : "Attend"},
                       {"seed", options.seed},
                       {"shape", ShapeWords(options.mix.front())},
                       {"sessions", load.sessions},
                       {"context", load.context},
                       {"decode", load.decode},
                       {"layers", load.layers},
                       {"fork_share", load.fork_share},
                       {"think_ms", load.think_ms},
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
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace attend::client
