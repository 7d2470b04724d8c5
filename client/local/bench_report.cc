// SPDX-License-Identifier: Apache-2.0
//
// The figures of bench-local as a table, as JSON and as a chart.

#include <algorithm>

#include "client/load/load_plot.h"
#include "client/load/report_text.h"
#include "client/load/run_json.h"
#include "client/local/local_bench.h"

namespace attend::client {
namespace {

using nlohmann::ordered_json;

double PerSecond(const WayResult& way) {
  return way.elapsed_s > 0 ? static_cast<double>(way.latency.count()) / way.elapsed_s : 0;
}

ordered_json WayJson(const WayResult& way, const WayResult& here, double flops) {
  const TimesAsLong beside = BesideHere(way, here);
  ordered_json json = {{"way", way.way},
                       {"kernel", way.kernel},
                       {"elapsed_s", way.elapsed_s},
                       {"calls_per_s", PerSecond(way)},
                       {"flops_per_s", PerSecond(way) * flops},
                       {"latency_ms", LatencyJson(way.latency)},
                       {"round_mean_ms", way.round_mean_ms},
                       {"times_as_long_as_here",
                        {{"median", beside.median},
                         {"lowest_round", beside.lowest},
                         {"highest_round", beside.highest}}}};
  json["phase_mean_ms"]["client"] = way.client_mean_ms;
  for (int phase = 0; phase < kPhases; ++phase) {
    json["phase_mean_ms"][kPhaseNames[phase]] = way.phase_mean_ms[phase];
  }
  json["client_verification"] = VerifiedJson(way.verified);
  return json;
}

// "cpu_flash": the kernels of all ways, each named once.
std::string KernelsOf(const BenchFile& file) {
  std::vector<std::string> names;
  for (const ShapeResult& shape : file.shapes) {
    for (const WayResult& way : shape.ways) {
      if (std::find(names.begin(), names.end(), way.kernel) == names.end()) {
        names.push_back(way.kernel);
      }
    }
  }
  std::string kernels;
  for (const std::string& name : names) kernels += (kernels.empty() ? "" : ", ") + name;
  return kernels;
}

// The local device; if the server has a device of that name, with the server's description.
std::string DevicesOf(const BenchFile& file) {
  std::string devices = file.device;
  for (const DeviceFacts& device : file.options.facts.server.devices) {
    if (device.name == file.device) devices += " (" + device.description + ")";
  }
  return devices;
}

std::string RangeText(const WayResult& way) {
  if (way.round_mean_ms.empty()) return "-";
  const auto [low, high] = std::minmax_element(way.round_mean_ms.begin(), way.round_mean_ms.end());
  std::string text;
  Append(&text, "%.3f - %.3f", *low, *high);
  return text;
}

void AppendWay(std::string* out, const WayResult& way) {
  const auto& mean = way.phase_mean_ms;
  const double copies = mean[kCopyIn] + mean[kCopyOut];
  const double server = std::max(0.0, mean[kTotal] - mean[kKernel] - copies);
  Append(out, "  %-30s %9.3f %9.3f %9.3f %19s %9.3f %9.3f %9.3f %9.3f %9.3f  %s\n", way.way.c_str(),
         Ms(way.latency.ValueAt(0.5)), Ms(way.latency.ValueAt(0.99)), way.latency.mean() * 1e-6,
         RangeText(way).c_str(), way.client_mean_ms, mean[kKernel], copies, server, mean[kNetwork],
         Printable(way.kernel).c_str());
}

}  // namespace

std::string BenchTable(const BenchFile& file) {
  std::string out;
  for (const ShapeResult& shape : file.shapes) {
    Append(&out, "%s\n  %-30s %9s %9s %9s %19s %9s %9s %9s %9s %9s\n", shape.spec.text.c_str(), "",
           "p50 ms", "p99 ms", "mean ms", "rounds' means", "client", "kernel", "copies", "server",
           "network");
    for (const WayResult& way : shape.ways) AppendWay(&out, way);
    for (size_t i = 1; i < shape.ways.size(); ++i) {
      const TimesAsLong beside = BesideHere(shape.ways[i], shape.ways.front());
      Append(&out, "  %s takes %.2f times as long as here (%.2f to %.2f in %zu rounds)\n",
             shape.ways[i].way.c_str(), beside.median, beside.lowest, beside.highest,
             shape.ways[i].round_mean_ms.size());
    }
    for (const WayResult& way : shape.ways) {
      if (way.verified.failed > 0) AppendVerified(&out, way.verified);
    }
  }
  return out;
}

std::string BenchJson(const BenchFile& file) {
  const LoadOptions& options = file.options;
  ordered_json json = FactsJson("attend-bench-local/1", options.facts);
  json["device"] = file.device;
  json["server"] = file.against;
  json["seed"] = options.seed;
  json["rounds"] = file.rounds;
  json["pool"] = options.pool;
  json["warmup_s"] = options.warmup_s;
  json["duration_s"] = options.duration_s;
  json["count"] = options.count;
  json["shapes"] = ordered_json::array();
  for (const ShapeResult& shape : file.shapes) {
    ordered_json one = ShapeJson(shape.spec);
    one["flops"] = shape.flops;
    one["ways"] = ordered_json::array();
    for (const WayResult& way : shape.ways) {
      one["ways"].push_back(WayJson(way, shape.ways.front(), shape.flops));
    }
    json["shapes"].push_back(std::move(one));
  }
  return JsonText(json);
}

Figure BenchFigure(const BenchFile& file) {
  Figure figure;
  figure.title = file.against.empty() ? "Attention in this process"
                                      : "What a call costs beside computing here";
  const RunFacts& facts = file.options.facts;
  figure.subtitle = {"client: " + facts.host.cpu + ", " + std::to_string(facts.host.cores) +
                         " cores; here: " + DevicesOf(file) + "; " + KernelsOf(file),
                     "one call at a time, from tensors to tensors; the ways took turns in " +
                         std::to_string(file.rounds) +
                         " rounds; the line spans the rounds' means; " + facts.started};
  figure.columns = 1;
  figure.panel_width = 860;
  figure.panel_height = 0;
  std::vector<std::string> parts = BarPhases();
  parts.back() = "gRPC and network";
  parts.insert(parts.begin(), "client");
  for (const ShapeResult& shape : file.shapes) {
    BarChart chart{shape.spec.text, "mean time of a call, ms", "ms", parts, {}};
    for (const WayResult& way : shape.ways) {
      BarChart::Row row{way.way, BarParts(way.phase_mean_ms), {}};
      row.parts.insert(row.parts.begin(), way.client_mean_ms);
      row.range = way.round_mean_ms;
      chart.rows.push_back(std::move(row));
    }
    figure.panel_height = std::max(figure.panel_height, 78 + 32.0 * chart.rows.size());
    figure.panels.emplace_back(std::move(chart));
  }
  return figure;
}

}  // namespace attend::client
