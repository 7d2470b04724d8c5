// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_file.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace attend::client {
namespace {

using nlohmann::json;

LatencyFigures ReadLatency(const json& from) {
  LatencyFigures latency;
  latency.count = from.at("count").get<int64_t>();
  if (latency.count == 0) return latency;
  for (const auto& [name, to] :
       {std::pair{"mean", &latency.mean_ms}, std::pair{"p50", &latency.p50_ms},
        std::pair{"p90", &latency.p90_ms}, std::pair{"p99", &latency.p99_ms},
        std::pair{"p99.9", &latency.p999_ms}, std::pair{"max", &latency.max_ms}}) {
    *to = from.at(name).get<double>();
  }
  return latency;
}

FileWindow ReadWindow(const json& from) {
  FileWindow window;
  window.start_s = from.at("start_s").get<double>();
  window.elapsed_s = from.at("elapsed_s").get<double>();
  window.reported = from.at("reported").get<bool>();
  window.requests_per_s = from.at("requests_per_s").get<double>();
  window.latency = ReadLatency(from.at("latency_from_intended_ms"));
  return window;
}

FileStep ReadStep(const json& from) {
  FileStep step;
  if (from.at("mode") == "open") {
    step.step.rate_per_s = from.at("rate_per_s").get<double>();
  } else {
    step.step.concurrency = from.at("concurrency").get<int64_t>();
  }
  step.elapsed_s = from.at("elapsed_s").get<double>();
  step.requests_per_s = from.at("requests_per_s").get<double>();
  if (from.contains("status") && step.elapsed_s > 0) {
    const json& status = from.at("status");
    step.refused_per_s = status.value("RESOURCE_EXHAUSTED", 0.0) / step.elapsed_s;
    step.late_per_s = status.value("DEADLINE_EXCEEDED", 0.0) / step.elapsed_s;
  }
  step.latency = ReadLatency(from.at("latency_from_intended_ms"));
  for (int phase = 0; phase < kPhases; ++phase) {
    const json& figures = phase == kNetwork ? from.at("network_ms")
                                            : from.at("server_phase_ms").at(kPhaseNames[phase]);
    step.phase_mean_ms[phase] = ReadLatency(figures).mean_ms;
  }
  const json& histogram = from.at("latency_histogram_ms");
  for (size_t i = 0; i < histogram.at("count").size(); ++i) {
    step.histogram.push_back({histogram.at("lower").at(i).get<double>(),
                              histogram.at("upper").at(i).get<double>(),
                              histogram.at("count").at(i).get<int64_t>()});
  }
  for (const json& window : from.at("windows")) step.windows.push_back(ReadWindow(window));
  step.judged = from.contains("stability");
  step.stable = step.judged && from.at("stability").at("stable").get<bool>();
  return step;
}

std::string Plain(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

LoadFile ReadFile(const json& from) {
  LoadFile file;
  if (const std::string schema = from.at("schema"); schema != "attend-load/1") {
    throw std::runtime_error("schema is \"" + schema + "\", must be \"attend-load/1\"");
  }
  for (const json& shape : from.at("shapes")) {
    file.shapes += (file.shapes.empty() ? "" : "; ") + shape.at("shape").get<std::string>();
  }
  std::string devices;
  for (const json& device : from.at("server_info").at("devices")) {
    devices += (devices.empty() ? "" : "; ") + device.at("description").get<std::string>();
  }
  file.setting = {{"shapes", file.shapes},
                  {"tool version", Plain(from.at("tool").at("version"))},
                  {"server version", Plain(from.at("server_info").at("version"))},
                  {"server build", Plain(from.at("server_info").at("build"))},
                  {"devices", devices},
                  {"started", Plain(from.at("started"))}};
  for (const char* name :
       {"server", "connections", "method", "transport", "arrivals", "seed", "warmup_s"}) {
    file.setting.emplace_back(name, Plain(from.at(name)));
  }
  for (const char* group : {"options", "host"}) {
    for (const auto& [name, value] : from.at(group).items()) {
      file.setting.emplace_back(std::string(group) + "." + name, Plain(value));
    }
  }
  for (const json& step : from.at("steps")) file.steps.push_back(ReadStep(step));
  return file;
}

}  // namespace

const std::string& LoadFile::Setting(const std::string& key) const {
  static const std::string kNone;
  for (const auto& [name, value] : setting) {
    if (name == key) return value;
  }
  return kNone;
}

Result<LoadFile> ParseLoadFile(const std::string& name, const std::string& text) {
  try {
    LoadFile file = ReadFile(json::parse(text));
    file.name = name;
    return file;
  } catch (const std::exception& fault) {
    return InvalidArgument(name + ": not the JSON of attend-client load: " + fault.what());
  }
}

Result<LoadFile> ReadLoadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return InvalidArgument(path + ": cannot be read");
  return ParseLoadFile(path, text.str());
}

}  // namespace attend::client
