// SPDX-License-Identifier: Apache-2.0

#include "client/load/run_json.h"

namespace attend::client {

using nlohmann::ordered_json;

ordered_json FactsJson(const std::string& schema, const RunFacts& facts) {
  ordered_json json;
  json["schema"] = schema;
  json["tool"] = {{"name", "attend-client"}, {"version", facts.tool_version}};
  json["command"] = facts.command;
  json["started"] = facts.started;
  json["host"] = {{"name", facts.host.name},
                  {"cpu", facts.host.cpu},
                  {"cores", facts.host.cores},
                  {"os", facts.host.os}};
  ordered_json& server = json["server_info"];
  server = {{"version", facts.server.version}, {"build", facts.server.build}};
  server["devices"] = ordered_json::array();
  for (const DeviceFacts& device : facts.server.devices) {
    server["devices"].push_back({{"name", device.name},
                                 {"description", device.description},
                                 {"memory_bytes", device.memory_bytes},
                                 {"units", device.units}});
  }
  server["kernels"] = facts.server.kernels;
  return json;
}

ordered_json ShapeJson(const CallSpec& spec) {
  const auto or_else = [](int64_t value, int64_t other) { return value == 0 ? other : value; };
  return {{"shape", spec.text},
          {"weight", spec.weight},
          {"dtype", DTypeName(spec.dtype)},
          {"batch", spec.batch},
          {"heads_q", spec.heads_q},
          {"heads_kv", or_else(spec.heads_kv, spec.heads_q)},
          {"len_q", spec.len_q},
          {"len_k", or_else(spec.len_k, spec.len_q)},
          {"dim", spec.dim},
          {"dim_v", or_else(spec.dim_v, spec.dim)}};
}

std::string JsonText(const ordered_json& json) {
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace attend::client
