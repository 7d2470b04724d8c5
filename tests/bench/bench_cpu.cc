// SPDX-License-Identifier: Apache-2.0
//
// The speed of cpu_flash, or of cpu_flash_amx where Select chooses it, compared with PyTorch (in
// turns, where it is installed), with the machine's peak of fused multiply-adds or tile products,
// and, where one row reads many keys, with its memory bandwidth. Every case is checked against the
// reference first; a wrong result prints no time. With --spoilt, cases with one NaN or Inf in each
// KV head that all rows see, compared with the same cases without it.

#include <hwy/targets.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "kernels/contract/select.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/reference/check_rows.h"
#include "tests/bench/bench_cpu_cases.h"
#include "tests/bench/bench_cpu_rival.h"
#include "tests/bench/fma_peak.h"
#include "tests/bench/read_rate.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// A problem with its memory; runs its forward or backward pass.
class Work {
 public:
  Work(const Case& c, const DeviceInfo& cpu, tbb::task_arena* arena)
      : arena_(arena),
        owned_(test::MakeAttention(c.spec, test::FreshSeed())),
        amx_(Select(c.spec.problem, cpu)->kernel == KernelId::kCpuFlashAmx),
        amx_backward_(SelectBackward(c.spec.problem, cpu)->kernel == KernelId::kCpuFlashAmx) {
    if (c.spoilt != 0) Spoil(c);
    Forward();
    if (c.backward) {
      gradients_ = std::make_unique<test::OwnedGradients>(owned_.attention, test::FreshSeed());
      gradients_->get().d_lse = nullptr;
      Backward();
    }
  }

  void Run() { gradients_ == nullptr ? Forward() : Backward(); }
  RowsReport Check() const {
    constexpr double kBudget = 3e7;
    const Attention& a = owned_.attention;
    if (gradients_ == nullptr) return CheckRows(a, SampleRows(a, 1, kBudget));
    return CheckGradients(a, gradients_->get(), 1, kBudget, nullptr, amx_backward_);
  }
  bool amx() const { return gradients_ == nullptr ? amx_ : amx_backward_; }
  double flops() const {
    return gradients_ == nullptr ? Flops(owned_.attention) : BackwardFlops(owned_.attention);
  }
  // The allocation that holds K and V.
  std::span<const std::byte> input() const {
    return {static_cast<const std::byte*>(owned_.input.data),
            static_cast<size_t>(owned_.input.bytes)};
  }

 private:
  // The last key, or the one that all rows see.
  void Spoil(const Case& c) {
    const Problem& p = c.spec.problem;
    const int64_t key = p.mask.right == 0 ? 0 : p.len_k - 1;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        void* const at = c.spoilt == 'k' ? owned_.K(b, h, key, 1) : owned_.V(b, h, key, 1);
        test::Set(owned_.attention, at, c.value);
      }
    }
  }
  void Forward() {
    const Attention* batch[] = {&owned_.attention};
    const size_t amx_from = amx_ ? 0 : 1;
    if (CpuFlashRunsInline(batch)) return CpuFlash(batch, {}, amx_from);
    arena_->execute([&] { CpuFlash(batch, {}, amx_from); });
  }
  void Backward() {
    arena_->execute([&] {
      const Attention& a = owned_.attention;
      amx_backward_ ? CpuFlashAmxGradients(a, gradients_->get())
                    : CpuFlashGradients(a, gradients_->get());
    });
  }

  tbb::task_arena* const arena_;
  test::OwnedAttention owned_;
  const bool amx_;
  const bool amx_backward_;
  std::unique_ptr<test::OwnedGradients> gradients_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

double Elapsed(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A turn of one contender: the seconds of each run. The first run counts only if it is long, as the
// previous contender's threads spin for a while at its beginning.
std::vector<double> Turn(const std::function<double()>& run) {
  constexpr double kLong = 0.05;
  const double first = run();
  if (first > kLong) return {first};
  std::vector<double> times;
  const Clock::time_point begin = Clock::now();
  while (times.size() < 3 || (Elapsed(begin) < kLong / 2 && times.size() < 100)) {
    times.push_back(run());
  }
  return times;
}

// Turns of all contenders until `seconds` are over: the medians of the turns, by contender.
std::vector<std::vector<double>> Race(const std::vector<std::function<double()>>& contenders,
                                      double seconds) {
  constexpr std::chrono::milliseconds kPause(10);
  std::vector<std::vector<double>> medians(contenders.size());
  const Clock::time_point begin = Clock::now();
  while (medians[0].size() < 3 || Elapsed(begin) < seconds) {
    for (size_t n = 0; n < contenders.size(); ++n) {
      std::this_thread::sleep_for(kPause);
      medians[n].push_back(Median(Turn(contenders[n])));
    }
  }
  return medians;
}

// The median over the turns of the ratio of the times.
double Ratio(const std::vector<double>& times, const std::vector<double>& of) {
  std::vector<double> ratios;
  for (size_t n = 0; n < times.size(); ++n) ratios.push_back(times[n] / of[n]);
  return Median(ratios);
}

nlohmann::json Measure(const Case& c, const DeviceInfo& cpu, tbb::task_arena* arena, int threads,
                       double seconds, CpuRival* rival) {
  Work work(c, cpu, arena);
  const RowsReport report = work.Check();
  // Gradients by an LSE of NaN cannot be judged.
  if (c.spoilt == 0 ? !report.ok : report.failed()) {
    return {{"name", c.name}, {"ok", false}, {"detail", report.detail}};
  }
  // Runs below 20 us are timed in groups.
  Clock::time_point begin = Clock::now();
  work.Run();
  const int group = std::max(1, static_cast<int>(20e-6 / std::max(Elapsed(begin), 1e-7)));
  const auto run_of = [&](Work* one) {
    return [&begin, group, one] {
      begin = Clock::now();
      for (int n = 0; n < group; ++n) one->Run();
      return Elapsed(begin) / group;
    };
  };
  std::vector<std::function<double()>> contenders = {run_of(&work)};
  nlohmann::json result = {{"name", c.name}, {"problem", Describe(c.spec.problem)}, {"ok", true}};
  result["kernel"] = work.amx() ? "cpu_flash_amx" : "cpu_flash";
  if (c.rival && rival != nullptr) {
    result["rival"] = rival->Prepare(c.spec.problem, c.backward);
    contenders.emplace_back([&] { return rival->Run(); });
  }
  if (c.decodes) {
    contenders.emplace_back([&] {
      const std::span<const std::byte> bytes = work.input();
      return static_cast<double>(bytes.size()) / MeasureReadRate(bytes, threads);
    });
  }
  std::unique_ptr<Work> finite;
  if (c.spoilt != 0) {
    Case other = c;
    other.spoilt = 0;
    finite = std::make_unique<Work>(other, cpu, arena);
    contenders.emplace_back(run_of(finite.get()));
  }
  const std::vector<std::vector<double>> times = Race(contenders, seconds);
  result["rows_checked"] = report.rows_checked;
  result["median_us"] = Median(times[0]) * 1e6;
  result["best_us"] = *std::min_element(times[0].begin(), times[0].end()) * 1e6;
  result["gflops"] = work.flops() / Median(times[0]) * 1e-9;
  result["turns"] = times[0].size();
  if (c.decodes) result["of_memory"] = Ratio(times.back(), times[0]);
  if (finite != nullptr) result["of_finite"] = Ratio(times[0], times[1]);
  if (result.contains("rival")) {
    result["rival_us"] = Median(times[1]) * 1e6;
    result["of_rival"] = Ratio(times[1], times[0]);
  }
  return result;
}

void PrintCase(const nlohmann::json& r, double peak) {
  const std::string name = r["name"];
  if (!r["ok"]) {
    std::printf("%-36s WRONG: %s\n", name.c_str(), r["detail"].get<std::string>().c_str());
    return;
  }
  std::printf("%-36s %10.1f %10.1f %8.1f %6.0f%% %6d", name.c_str(), r["median_us"].get<double>(),
              r["best_us"].get<double>(), r["gflops"].get<double>(),
              r["gflops"].get<double>() / peak * 100, r["turns"].get<int>());
  if (r.contains("rival")) {
    std::printf(" %10.1f %6.2fx %s", r["rival_us"].get<double>(), r["of_rival"].get<double>(),
                r["rival"].get<std::string>().c_str());
  }
  if (r.contains("of_memory")) std::printf("  %.2f of memory", r["of_memory"].get<double>());
  if (r.contains("of_finite")) std::printf("  %.2f of finite", r["of_finite"].get<double>());
  std::printf("\n");
  std::fflush(stdout);
}

void PrintPython(const nlohmann::json& found) {
  std::printf("attend.attention of B1 H1 L16 D64 fp32 in Python, us:");
  for (const auto& [name, us] : found.items())
    std::printf(" %s %s", name.c_str(), us.dump().c_str());
  std::printf("\n");
}

// Limits this process and its children to AVX2.
void StayWithAvx2() {
  hwy::SetSupportedTargetsForTest(HWY_AVX2 | HWY_SSE4);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  setenv("ATEN_CPU_CAPABILITY", "avx2", 1);
  setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 1);
  setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2", 1);
}

int Main(int argc, char** argv) {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  double seconds = 1.0;
  std::string filter;
  std::string json_path;
  std::string python = "python3";
  bool avx2 = false;
  bool without_amx = false, spoilt = false;
  CLI::App app("Times cpu_flash against PyTorch and this machine's multiply-add peak");
  app.add_option("--threads", threads, "Threads to use")->capture_default_str();
  app.add_option("--seconds", seconds, "Seconds for each case")->capture_default_str();
  app.add_option("--filter", filter, "Run only cases whose name contains this");
  app.add_option("--json", json_path, "Also write the results to this file");
  app.add_option("--python", python, "Interpreter, with PyTorch or without")->capture_default_str();
  app.add_flag("--avx2", avx2, "Do without AVX-512, in PyTorch too");
  app.add_flag("--without-amx", without_amx, "Run cpu_flash instead of cpu_flash_amx");
  app.add_flag("--spoilt", spoilt, "Run cases with NaN or Inf, without PyTorch");
  CLI11_PARSE(app, argc, argv);
#if HWY_ARCH_X86
  if (avx2) StayWithAvx2();
#endif
  const std::unique_ptr<CpuRival> python_process = CpuRival::Start(python, threads);
  CpuRival* const rival = python_process == nullptr || python_process->version().empty()
                              ? nullptr
                              : python_process.get();
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<size_t>(threads));
  tbb::task_arena arena(threads);
  // The peak is measured again around every case, and the highest counts, so that other load on the
  // machine does not lower it.
  double peak = MeasureFmaPeak(threads) * 1e-9;
  DeviceInfo cpu;
  cpu.not_amx = without_amx ? "switched off" : cpu_flash::WhyNoAmx();
  double tile_peak = cpu.not_amx.empty() ? MeasureTilePeak(threads) * 1e-9 : 0;
  nlohmann::json results = {{"target", CpuFlashTarget()},
                            {"threads", threads},
                            {"rival", rival == nullptr ? "" : rival->version()},
                            {"cases", nlohmann::json::array()}};
  std::printf("target %s, %d threads; %s\n", CpuFlashTarget().c_str(), threads,
              rival == nullptr ? "no PyTorch" : rival->version().c_str());
  std::printf("%-36s %10s %10s %8s %7s %6s %10s %7s\n", "case", "median us", "best us", "GFLOP/s",
              "of peak", "turns", "PyTorch us", "faster");
  bool ok = true;
  for (const Case& c : spoilt ? SpoiltCases() : Cases()) {
    if (c.name.find(filter) == std::string::npos) continue;
    const nlohmann::json one = Measure(c, cpu, &arena, threads, seconds, rival);
    peak = std::max(peak, MeasureFmaPeak(threads) * 1e-9);
    if (tile_peak > 0) tile_peak = std::max(tile_peak, MeasureTilePeak(threads) * 1e-9);
    PrintCase(one, one.value("kernel", "") == "cpu_flash_amx" ? tile_peak : peak);
    ok = ok && one["ok"].get<bool>();
    results["cases"].push_back(one);
  }
  results["peak_gflops"] = peak;
  std::printf("fp32 multiply-add peak %.1f GFLOP/s\n", peak);
  if (tile_peak > 0) {
    results["tile_peak_gflops"] = tile_peak;
    results["tile_peak_one_gflops"] = MeasureTilePeak(1) * 1e-9;
    std::printf("bf16 tile peak %.1f GFLOP/s, of one thread %.1f\n", tile_peak,
                results["tile_peak_one_gflops"].get<double>());
  } else {
    std::printf("no tiles: %s\n", std::string(cpu.not_amx).c_str());
  }
  if (python_process != nullptr && std::string("python").find(filter) != std::string::npos) {
    results["python"] =
        python_process->PythonCall(Plain(1, 1, 16, 64, DType::kFloat32).spec.problem);
    PrintPython(results["python"]);
  }
  if (!json_path.empty()) std::ofstream(json_path) << results.dump(2) << "\n";
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) { return attend::bench::Main(argc, argv); }
