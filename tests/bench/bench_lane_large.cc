// SPDX-License-Identifier: Apache-2.0
//
// bench_lane: large attentions, the time that small ones wait beside them, and a timeline.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/bench/bench_lane.h"

namespace attend::bench {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{512} << 20;

// Bandwidth of one direction of the bus alone, in copies of `bytes`.
double BusBytesPerSecond(int64_t bytes, cudaMemcpyKind kind) {
  const test::PinnedBlock host(bytes, nullptr);
  if (host.get() == nullptr) throw std::runtime_error("no page-locked memory");
  void* device = nullptr;
  cudaStream_t stream = nullptr;
  RequireCuda(cudaMalloc(&device, static_cast<size_t>(bytes)));
  RequireCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  constexpr int kCopies = 10;
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const double begin = MicrosecondsNow();
    for (int n = 0; n < kCopies; ++n) {
      const bool in = kind == cudaMemcpyHostToDevice;
      RequireCuda(cudaMemcpyAsync(in ? device : host.get(), in ? host.get() : device,
                                  static_cast<size_t>(bytes), kind, stream));
    }
    RequireCuda(cudaStreamSynchronize(stream));
    const double seconds = (MicrosecondsNow() - begin) / 1e6;
    best = std::max(best, kCopies * static_cast<double>(bytes) / seconds);
  }
  RequireCuda(cudaStreamDestroy(stream));
  RequireCuda(cudaFree(device));
  return best;
}

// Lanes that run batches of one item back to back, until they are stopped or `batches` are done.
class BackToBack {
 public:
  BackToBack(test::LaneHarness* harness, const Problem& problem, bool rows_before_heads,
             const cuda::LaneTuning& tuning, int lanes) {
    for (int n = 0; n < lanes; ++n) {
      items_.push_back(std::make_unique<LaneItem>(harness, problem, rows_before_heads));
      lanes_.push_back(MakeBenchLane(harness, tuning, kWorkspaceBytes));
      items_.back()->Poison();
      last_ = TimeBatch(lanes_.back().get(), {&items_.back()->item(), 1}).outcome;
      items_.back()->Check();
    }
  }
  ~BackToBack() { Stop(); }

  // Runs `batches` on every lane; returns the seconds until all are done.
  double Run(int batches) {
    const double begin = MicrosecondsNow();
    Start(batches);
    Join();
    return (MicrosecondsNow() - begin) / 1e6;
  }

  void Start(int batches) {
    stop_ = false;
    for (size_t n = 0; n < lanes_.size(); ++n) {
      threads_.emplace_back([this, n, batches] {
        for (int batch = 0; batch < batches && !stop_; ++batch) {
          BatchOutcome outcome = TimeBatch(lanes_[n].get(), {&items_[n]->item(), 1}).outcome;
          bytes_in_ += items_[n]->item().inputs.bytes();
          if (n == 0) last_ = std::move(outcome);
        }
      });
    }
  }
  void Stop() {
    stop_ = true;
    Join();
  }

  int64_t bytes_in() const { return bytes_in_; }
  const BatchOutcome& last() const { return last_; }  // of the first lane; only when nothing runs

 private:
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  std::vector<std::unique_ptr<LaneItem>> items_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> bytes_in_{0};
  BatchOutcome last_;
};

cuda::LaneTuning Parts(int least, int most) {
  cuda::LaneTuning tuning;
  tuning.cut.parts_min = least;
  tuning.cut.parts_max = most;
  return tuning;
}

// A tuning that bounds launches by time only.
cuda::LaneTuning Launches(double seconds) {
  cuda::LaneTuning tuning = Parts(1, 1);
  tuning.cut.launch_seconds_max = seconds;
  return tuning;
}

struct LargeCase {
  const char* name;
  Problem problem;
  bool rows_before_heads;
  cuda::LaneTuning tuning;
  std::vector<int> lanes;
};

std::vector<LargeCase> LargeCases() {
  const Problem square = HalfProblem(1, 16, 16384, 128);
  Problem causal = square;
  causal.mask.right = 0;
  const Problem batch = HalfProblem(64, 16, 1024, 64);
  return {
      {"H16 L16384 D128, whole", square, false, Parts(1, 1), {1, 2, 4}},
      {"H16 L16384 D128, as planned", square, false, {}, {1, 2, 4}},
      {"H16 L16384 D128, 4 parts", square, false, Parts(4, 4), {1}},
      {"H16 L16384 D128, 8 parts", square, false, Parts(8, 8), {1}},
      {"H16 L16384 D128, 32 parts", square, false, Parts(32, 32), {1}},
      {"H16 L16384 D128 causal, whole", causal, false, Parts(1, 1), {1}},
      {"H16 L16384 D128 causal, as planned", causal, false, {}, {1, 2}},
      {"BLHD H16 L16384 D128, whole", square, true, Parts(1, 1), {1}},
      {"BLHD H16 L16384 D128, as planned", square, true, {}, {1, 2}},
      {"BLHD H16 L16384 D128, 4 parts", square, true, Parts(4, 4), {1}},
      {"B64 H16 L1024 D64, whole", batch, false, Parts(1, 1), {1}},
      {"B64 H16 L1024 D64, as planned", batch, false, {}, {1, 2}},
      {"H8 L4096 D128 (32 MiB), whole", HalfProblem(1, 8, 4096, 128), false, Parts(1, 1), {1}},
      {"H8 L4096 D128 (32 MiB), as planned", HalfProblem(1, 8, 4096, 128), false, {}, {1, 4}},
      {"H4 L4096 D128 (16 MiB), whole", HalfProblem(1, 4, 4096, 128), false, Parts(1, 1), {1}},
      {"H4 L4096 D128 (16 MiB), 4 parts", HalfProblem(1, 4, 4096, 128), false, Parts(4, 4), {1}},
      {"H4 L2048 D128 (8 MiB), whole", HalfProblem(1, 4, 2048, 128), false, Parts(1, 1), {1}},
      {"H4 L2048 D128 (8 MiB), 2 parts", HalfProblem(1, 4, 2048, 128), false, Parts(2, 2), {1}},
      {"H4 L2048 D128 (8 MiB), 4 parts", HalfProblem(1, 4, 2048, 128), false, Parts(4, 4), {1}}};
}

}  // namespace

void BenchLarge(test::LaneHarness* harness) {
  const double bus = BusBytesPerSecond(int64_t{192} << 20, cudaMemcpyHostToDevice);
  const double bus_out = BusBytesPerSecond(int64_t{64} << 20, cudaMemcpyDeviceToHost);
  std::printf("\n### Large attentions back to back from page-locked memory\n\n");
  std::printf("Copies alone: %.1f GB/s in, %.1f GB/s out. ", bus / 1e9, bus_out / 1e9);
  std::printf("Phases are of the last batch of the first lane; overlap is their sum / span.\n\n");
  std::printf(
      "| fp16 | parts | lanes | ms each | GB/s in | share of the bus | in ms | kernel | out | span "
      "| "
      "overlap |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const LargeCase& c : LargeCases()) {
    for (const int lanes : c.lanes) {
      BackToBack run(harness, c.problem, c.rows_before_heads, c.tuning, lanes);
      (void)run.Run(1);
      const int batches = 12;
      const int64_t before = run.bytes_in();
      const double seconds = run.Run(batches);
      const double rate = static_cast<double>(run.bytes_in() - before) / seconds;
      const BatchOutcome& o = run.last();
      const auto ms = [](int64_t ns) { return static_cast<double>(ns) / 1e6; };
      const int64_t sum = o.copy_in_ns + o.kernel_ns + o.copy_out_ns;
      std::printf("| %s | %lld | %d | %.2f | %.1f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |\n",
                  c.name, static_cast<long long>(o.cut_parts), lanes,
                  seconds * 1e3 / batches / lanes, rate / 1e9, rate / bus, ms(o.copy_in_ns),
                  ms(o.kernel_ns), ms(o.copy_out_ns), ms(o.span_ns),
                  static_cast<double>(sum) / static_cast<double>(std::max<int64_t>(o.span_ns, 1)));
      std::fflush(stdout);
    }
  }
}

namespace {

struct BesideCase {
  const char* name;
  cuda::LaneTuning small;
  cuda::LaneTuning large;
  int large_lanes;
};

std::vector<BesideCase> BesideCases() {
  const auto free = [](cuda::LaneTuning tuning, int count) {
    tuning.multiprocessors_free = count;
    return tuning;
  };
  cuda::LaneTuning engine;
  engine.copy_kernel_bytes_max = 0;
  return {{"alone, copy kernel", {}, {}, 0},
          {"alone, copy engine", engine, {}, 0},
          {"copy kernel; launches unbounded", {}, Launches(1e3), 2},
          {"copy engine; launches unbounded", engine, Launches(1e3), 2},
          {"copy kernel; launches of 2 ms", {}, Launches(2e-3), 2},
          {"copy kernel; launches of 1 ms", {}, Launches(1e-3), 2},
          {"copy engine; launches of 1 ms", engine, Launches(1e-3), 2},
          {"copy kernel; launches of 0.5 ms", {}, Launches(0.5e-3), 2},
          {"copy kernel; launches of 0.25 ms", {}, Launches(0.25e-3), 2},
          {"copy engine; launches of 0.25 ms", engine, Launches(0.25e-3), 2},
          {"copy kernel; 1 ms, 4 units free, one large lane", {}, free(Launches(1e-3), 4), 1},
          {"copy kernel; 1 ms, one large lane", {}, Launches(1e-3), 1},
          {"copy kernel; 1 ms, 4 units free", {}, free(Launches(1e-3), 4), 2},
          {"copy engine; 1 ms, 4 units free", engine, free(Launches(1e-3), 4), 2},
          {"copy kernel; 1 ms, 12 units free", {}, free(Launches(1e-3), 12), 2},
          {"copy kernel; 0.25 ms, 4 units free", {}, free(Launches(0.25e-3), 4), 2}};
}

}  // namespace

void BenchBeside(test::LaneHarness* harness) {
  const LaneItem small(harness, HalfProblem(1, 8, 128, 64));
  const Problem large = HalfProblem(1, 4, 32768, 128);
  std::printf("\n### B1 H8 L128 D64 beside lanes that run H4 L32768 D128 (3 ms) back to back\n\n");
  std::printf("| variant | p50 us | p90 | p99 | max | large/s | vs without |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  double most_large = 0;
  for (const BesideCase& c : BesideCases()) {
    const std::unique_ptr<Lane> lane = MakeBenchLane(harness, c.small, 16 << 20);
    small.Poison();
    (void)TimeBatch(lane.get(), {&small.item(), 1});
    small.Check();
    BackToBack others(harness, large, false, c.large, c.large_lanes);
    const double begin = MicrosecondsNow();
    others.Start(1 << 30);
    std::vector<double> times;
    while (times.size() < 50 || MicrosecondsNow() - begin < 0.4e6) {
      times.push_back(TimeBatch(lane.get(), {&small.item(), 1}).total_us);
    }
    others.Stop();
    const double seconds = (MicrosecondsNow() - begin) / 1e6;
    const double rate =
        static_cast<double>(others.bytes_in()) / (3.0 * 4 * 32768 * 128 * 2) / seconds;
    most_large = std::max(most_large, rate);
    std::printf("| %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.2f |\n", c.name, Median(times),
                Quantile(times, 0.9), Quantile(times, 0.99), Quantile(times, 1), rate,
                most_large > 0 ? rate / most_large : 0.0);
    std::fflush(stdout);
  }
}

namespace {

struct Phase {
  int lane;
  cuda::PartPipeline::Stage stage;
  int64_t part;
  double begin_us;
  double end_us;
};

void PrintPhases(std::vector<Phase> phases) {
  constexpr int kColumns = 96;
  std::sort(phases.begin(), phases.end(), [](const Phase& a, const Phase& b) {
    return a.lane != b.lane ? a.lane < b.lane
                            : (a.stage != b.stage ? a.stage < b.stage : a.begin_us < b.begin_us);
  });
  double first = phases.front().begin_us, last = 0;
  for (const Phase& phase : phases) {
    first = std::min(first, phase.begin_us);
    last = std::max(last, phase.end_us);
  }
  const char* const names[] = {"copy in ", "kernel  ", "copy out"};
  std::printf("\nOne column is %.0f us; a letter is a part, lower case small batches.\n\n",
              (last - first) / kColumns);
  for (size_t n = 0; n < phases.size();) {
    std::string row(kColumns, '.');
    const Phase& head = phases[n];
    for (; n < phases.size() && phases[n].lane == head.lane && phases[n].stage == head.stage; ++n) {
      const double scale = kColumns / (last - first);
      const auto from = static_cast<int>((phases[n].begin_us - first) * scale);
      const auto to = static_cast<int>((phases[n].end_us - first) * scale);
      const char mark =
          phases[n].part < 0 ? 's' : static_cast<char>('A' + static_cast<int>(phases[n].part % 26));
      for (int at = from; at <= std::min(to, kColumns - 1); ++at) row[at] = mark;
    }
    std::printf("    lane %d %s %s\n", head.lane, names[head.stage], row.c_str());
  }
  std::printf("\n| lane | stage | part | begin us | end us |\n|---|---|---|---|---|\n");
  std::sort(phases.begin(), phases.end(),
            [](const Phase& a, const Phase& b) { return a.begin_us < b.begin_us; });
  for (const Phase& phase : phases) {
    std::printf("| %d | %s | %lld | %.0f | %.0f |\n", phase.lane, names[phase.stage],
                static_cast<long long>(phase.part), phase.begin_us - first, phase.end_us - first);
  }
}

}  // namespace

void PrintTimeline(test::LaneHarness* harness) {
  std::printf("\n### Timeline: two lanes with one H8 L16384 D128 each, two with small batches\n");
  cudaEvent_t origin = nullptr;
  RequireCuda(cudaEventCreate(&origin));
  RequireCuda(cudaEventRecord(origin, nullptr));
  RequireCuda(cudaEventSynchronize(origin));
  std::mutex mutex;
  bool recording = false;
  std::vector<Phase> phases;
  std::vector<std::unique_ptr<LaneItem>> items;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int n = 0; n < 4; ++n) {
    const auto sink = [&, n](cuda::PartPipeline::Stage stage, int64_t part, cudaEvent_t begin,
                             cudaEvent_t end) {
      std::lock_guard lock(mutex);
      if (!recording || (part < 0 && n < 2)) return;
      phases.push_back({n, stage, part, static_cast<double>(cuda::ElapsedNs(origin, begin)) / 1e3,
                        static_cast<double>(cuda::ElapsedNs(origin, end)) / 1e3});
    };
    items.push_back(std::make_unique<LaneItem>(
        harness, n < 2 ? HalfProblem(1, 8, 16384, 128) : HalfProblem(1, 8, 128, 64)));
    lanes.push_back(MakeBenchLane(harness, {}, kWorkspaceBytes, sink));
    items.back()->Poison();
    (void)TimeBatch(lanes.back().get(), {&items.back()->item(), 1});
    items.back()->Check();
  }
  RequireCuda(cudaEventRecord(origin, nullptr));
  RequireCuda(cudaEventSynchronize(origin));
  {
    std::lock_guard lock(mutex);
    recording = true;
  }
  std::vector<std::thread> threads;
  for (size_t n = 0; n < lanes.size(); ++n) {
    threads.emplace_back([&, n] {
      for (int batch = 0; batch < (n < 2 ? 1 : 8); ++batch) {
        (void)TimeBatch(lanes[n].get(), {&items[n]->item(), 1});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  lanes.clear();
  PrintPhases(std::move(phases));
  RequireCuda(cudaEventDestroy(origin));
}

}  // namespace attend::bench
