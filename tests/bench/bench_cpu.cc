// SPDX-License-Identifier: Apache-2.0
//
// How fast cpu_flash is, beside the machine's own peak of fused multiply-adds measured in the same
// run. Every case is checked against the reference first; a wrong result prints no time.

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "tests/bench/fma_peak.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  test::ProblemSpec spec;
};

struct Timing {
  double median_s = 0;
  double best_s = 0;
  int runs = 0;
};

std::vector<Case> Cases() {
  const auto make = [](int64_t b, int64_t hq, int64_t hkv, int64_t lq, int64_t lk, int64_t d,
                       DType dtype = DType::kFloat32, bool causal = false) {
    test::ProblemSpec spec = test::MakeSpec(b, hq, hkv, lq, lk, d, d, dtype);
    spec.problem.return_lse = false;
    if (causal) spec.problem.mask.right = 0;
    return spec;
  };
  test::ProblemSpec blhd = make(1, 8, 8, 2048, 2048, 128);
  blhd.layout = test::Layout::kBLHD;
  test::ProblemSpec bias = make(1, 8, 8, 1024, 1024, 64);
  bias.problem.has_bias = true;
  test::ProblemSpec softcap = make(1, 8, 8, 1024, 1024, 64);
  softcap.problem.softcap = 50;
  return {
      {"fp32 L2048 D64", make(1, 8, 8, 2048, 2048, 64)},
      {"fp32 L2048 D128", make(1, 8, 8, 2048, 2048, 128)},
      {"fp32 L2048 D128 causal", make(1, 8, 8, 2048, 2048, 128, DType::kFloat32, true)},
      {"fp32 L2048 D128 BLHD", blhd},
      {"fp16 L2048 D128", make(1, 8, 8, 2048, 2048, 128, DType::kFloat16)},
      {"bf16 L2048 D128", make(1, 8, 8, 2048, 2048, 128, DType::kBFloat16)},
      {"fp32 L2048 D256", make(1, 4, 4, 2048, 2048, 256)},
      {"fp32 L1000 D80 GQA 4", make(1, 8, 2, 1000, 1000, 80)},
      {"fp32 L1024 D64 bias", bias},
      {"fp32 L1024 D64 softcap", softcap},
      {"fp32 B64 H8 L64 D64", make(64, 8, 8, 64, 64, 64)},
      {"bf16 decode B8 H32/8 Lk4096 D128", make(8, 32, 8, 1, 4096, 128, DType::kBFloat16)},
      {"fp32 B1 H1 L16 D64", make(1, 1, 1, 16, 16, 64)},
      {"fp32 B1 H1 L128 D64", make(1, 1, 1, 128, 128, 64)},
  };
}

void RunOnce(tbb::task_arena* arena, const Attention& attention) {
  const Attention* batch[] = {&attention};
  if (CpuFlashRunsInline(batch)) return CpuFlash(batch);
  arena->execute([&] { CpuFlash(batch); });
}

// Repeats for `seconds`, at least five times; tiny cases are timed in groups of about 100 us.
Timing Time(tbb::task_arena* arena, const Attention& attention, double seconds) {
  const auto elapsed = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  Clock::time_point begin = Clock::now();
  RunOnce(arena, attention);
  const int group = std::max(1, static_cast<int>(100e-6 / std::max(elapsed(begin), 1e-7)));
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (times.size() < 5 || elapsed(start) < seconds) {
    begin = Clock::now();
    for (int n = 0; n < group; ++n) RunOnce(arena, attention);
    times.push_back(elapsed(begin) / group);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), static_cast<int>(times.size()) * group};
}

nlohmann::json Measure(const Case& c, tbb::task_arena* arena, double seconds) {
  test::OwnedAttention owned = test::MakeAttention(c.spec, test::FreshSeed());
  RunOnce(arena, owned.attention);
  const std::vector<RowId> rows = SampleRows(owned.attention, 1, 3e7);
  const RowsReport report = CheckRows(owned.attention, rows);
  if (!report.ok) {
    return {{"name", c.name}, {"ok", false}, {"detail", report.detail}};
  }
  const Timing timing = Time(arena, owned.attention, seconds);
  return {{"name", c.name},
          {"problem", Describe(c.spec.problem)},
          {"ok", true},
          {"rows_checked", report.rows_checked},
          {"median_us", timing.median_s * 1e6},
          {"best_us", timing.best_s * 1e6},
          {"gflops", Flops(owned.attention) / timing.median_s * 1e-9},
          {"runs", timing.runs}};
}

void PrintTable(nlohmann::json* results) {
  const double peak = (*results)["peak_gflops"];
  std::printf("target %s, %d threads, fp32 multiply-add peak %.1f GFLOP/s\n",
              (*results)["target"].get<std::string>().c_str(), (*results)["threads"].get<int>(),
              peak);
  std::printf("%-34s %10s %10s %8s %7s %7s\n", "case", "median us", "best us", "GFLOP/s", "of peak",
              "runs");
  for (nlohmann::json& r : (*results)["cases"]) {
    const std::string name = r["name"];
    if (!r["ok"]) {
      std::printf("%-34s WRONG: %s\n", name.c_str(), r["detail"].get<std::string>().c_str());
      continue;
    }
    r["share_of_peak"] = r["gflops"].get<double>() / peak;
    std::printf("%-34s %10.1f %10.1f %8.1f %6.0f%% %7d\n", name.c_str(),
                r["median_us"].get<double>(), r["best_us"].get<double>(), r["gflops"].get<double>(),
                r["share_of_peak"].get<double>() * 100, r["runs"].get<int>());
  }
}

int Main(int argc, char** argv) {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  double seconds = 1.0;
  std::string filter;
  std::string json_path;
  CLI::App app("Times cpu_flash against this machine's multiply-add peak");
  app.add_option("--threads", threads, "Threads to use")->capture_default_str();
  app.add_option("--seconds", seconds, "Seconds for each case")->capture_default_str();
  app.add_option("--filter", filter, "Run only cases whose name contains this");
  app.add_option("--json", json_path, "Also write the results to this file");
  CLI11_PARSE(app, argc, argv);

  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<size_t>(threads));
  tbb::task_arena arena(threads);
  // The peak is taken anew around every case: the highest is what the machine can do, whatever else
  // ran on it for a while.
  double peak = MeasureFmaPeak(threads);
  nlohmann::json results = {
      {"target", CpuFlashTarget()}, {"threads", threads}, {"cases", nlohmann::json::array()}};
  bool ok = true;
  for (const Case& c : Cases()) {
    if (c.name.find(filter) == std::string::npos) continue;
    results["cases"].push_back(Measure(c, &arena, seconds));
    ok = ok && results["cases"].back()["ok"].get<bool>();
    peak = std::max(peak, MeasureFmaPeak(threads));
  }
  results["peak_gflops"] = peak * 1e-9;
  PrintTable(&results);
  if (!json_path.empty()) std::ofstream(json_path) << results.dump(2) << "\n";
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) { return attend::bench::Main(argc, argv); }
