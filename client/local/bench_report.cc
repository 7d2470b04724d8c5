// SPDX-License-Identifier: Apache-2.0
//
// The figures of bench-local as a table, as JSON and as a picture.

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

ordered_json WayJson(const WayResult& way, double flops) {
  ordered_json json = {{"way", way.way},
                       {"kernel", way.kernel},
                       {"elapsed_s", way.elapsed_s},
                       {"calls_per_s", PerSecond(way)},
                       {"flops_per_s", PerSecond(way) * flops},
                       {"latency_ms", LatencyJson(way.latency)}};
  for (int phase = 0; phase < kPhases; ++phase) {
    json["phase_mean_ms"][kPhaseNames[phase]] = way.phase_mean_ms[phase];
  }
  json["client_verification"] = VerifiedJson(way.verified);
  return json;
}

// "cpu_flash": every way's kernel is named once if it is the same.
std::string KernelsOf(const BenchFile& file) {
  std::string kernels;
  for (const ShapeResult& shape : file.shapes) {
    for (const WayResult& way : shape.ways) {
      if (kernels.find(way.kernel) != std::string::npos) continue;
      kernels += (kernels.empty() ? "" : ", ") + way.kernel;
    }
  }
  return kernels;
}

}  // namespace

std::string BenchTable(const BenchFile& file) {
  std::string out;
  for (const ShapeResult& shape : file.shapes) {
    Append(&out, "%s\n  %-22s %9s %9s %9s %9s %9s %9s %9s\n", shape.spec.text.c_str(), "", "p50 ms",
           "p99 ms", "mean ms", "kernel", "copies", "server", "network");
    for (const WayResult& way : shape.ways) {
      const auto& mean = way.phase_mean_ms;
      const double copies = mean[kCopyIn] + mean[kCopyOut];
      const double server =
          mean[kTotal] > 0 ? std::max(0.0, mean[kTotal] - mean[kKernel] - copies) : 0;
      Append(&out, "  %-22s %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f %9.3f  %s\n", way.way.c_str(),
             Ms(way.latency.ValueAt(0.5)), Ms(way.latency.ValueAt(0.99)), way.latency.mean() * 1e-6,
             mean[kKernel], copies, server, mean[kNetwork], way.kernel.c_str());
    }
    const double here = shape.ways.front().latency.mean();
    for (size_t i = 1; i < shape.ways.size() && here > 0; ++i) {
      Append(&out, "  %s takes %.2f times as long as here\n", shape.ways[i].way.c_str(),
             shape.ways[i].latency.mean() / here);
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
  json["pool"] = options.pool;
  json["warmup_s"] = options.warmup_s;
  json["duration_s"] = options.duration_s;
  json["count"] = options.count;
  json["shapes"] = ordered_json::array();
  for (const ShapeResult& shape : file.shapes) {
    ordered_json one = ShapeJson(shape.spec);
    one["flops"] = shape.flops;
    one["ways"] = ordered_json::array();
    for (const WayResult& way : shape.ways) one["ways"].push_back(WayJson(way, shape.flops));
    json["shapes"].push_back(std::move(one));
  }
  return JsonText(json);
}

Figure BenchFigure(const BenchFile& file) {
  Figure figure;
  figure.title = file.against.empty() ? "Attention in this process"
                                      : "What a call costs beside computing here";
  const HostFacts& host = file.options.facts.host;
  figure.subtitle = {host.cpu + ", " + std::to_string(host.cores) + " cores; one call at a time; " +
                     KernelsOf(file)};
  figure.columns = 1;
  figure.panel_width = 820;
  figure.panel_height = 0;
  for (const ShapeResult& shape : file.shapes) {
    BarChart chart{shape.spec.text, "mean time of a call, ms", "ms", BarPhases(), {}};
    for (const WayResult& way : shape.ways) {
      chart.rows.push_back({way.way, BarParts(way.phase_mean_ms)});
    }
    figure.panel_height = std::max(figure.panel_height, 78 + 32.0 * chart.rows.size());
    figure.panels.emplace_back(std::move(chart));
  }
  return figure;
}

}  // namespace attend::client
