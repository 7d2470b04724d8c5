// SPDX-License-Identifier: Apache-2.0
//
// The row about memory over time.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/bench/service/rows.h"
#include "tests/bench/service/scrape.h"
#include "tests/bench/service/soak.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Flat: what a twentieth more says is chance.
constexpr Target kFlatTarget{Target::Sense::kAtMost, 1.05};
constexpr double kFirstSeconds = 60;
constexpr char kDeviceMemory[] = "attend_gpu_memory_used_bytes";
constexpr char kHostMemory[] = "attend_host_memory_used_bytes";

struct Memory {
  double resident_mib = 0;
  std::optional<double> device_mib;  // if the server measures it
};

// The median of some readings around one moment: requests come and go.
Result<Memory> ReadMemory(const ServerProcess& server) {
  constexpr int kReadings = 9;
  std::vector<double> resident;
  std::vector<double> device;
  for (int i = 0; i < kReadings; ++i) {
    const int64_t bytes = server.resident_bytes();
    if (bytes < 0) return Unavailable("the server is gone");
    resident.push_back(static_cast<double>(bytes) / (1 << 20));
    const std::optional<double> used = MetricSum(Scrape(server.metrics_address()), kDeviceMemory);
    if (used.has_value()) device.push_back(*used / (1 << 20));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  Memory memory;
  memory.resident_mib = Median(resident);
  if (!device.empty()) memory.device_mib = Median(device);
  return memory;
}

void SleepUntil(Clock::time_point begin, double seconds) {
  std::this_thread::sleep_until(begin +
                                std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
}

// Small, middling, and large enough for chunks.
std::vector<std::shared_ptr<Work>> SoakWorks(const Bench& bench) {
  const DType dtype = DType::kFloat16;
  const Truth truth = Truth::kAttention;
  const uint64_t seed = bench.options().seed;
  std::vector<std::shared_ptr<Work>> works = {bench.SmallWork()};
  const auto add = [&](int64_t heads, int64_t len_q, int64_t len_k) {
    works.push_back(std::make_shared<Work>(
        "soak", test::MakeSpec(1, heads, heads, len_q, len_k, 64, 64, dtype), truth, seed));
  };
  add(1, 16, 777);
  add(4, 33, 2048);
  if (bench.gpu()) add(8, 2048, 2048);
  if (bench.gpu()) add(16, 4096, 8192);
  return works;
}

struct Readings {
  Memory first;
  Memory last;
  double host_left_mib = 0;  // held by requests once all have ended
};

Result<Readings> Soak(Bench& bench, const ServerProcess& server, double first_seconds) {
  SoakLoad load(server.address(), SoakWorks(bench), bench.options().seed);
  const Clock::time_point begin = Clock::now();
  SleepUntil(begin, first_seconds);
  const Result<Memory> first = ReadMemory(server);
  SleepUntil(begin, bench.options().soak_seconds);
  const Result<Memory> last = ReadMemory(server);
  load.Stop();
  if (!load.fault().empty()) return Internal(load.fault());
  if (!first.ok()) return first.status();
  if (!last.ok()) return last.status();
  const SoakLoad::Counts counts = load.counts();
  if (counts.answered == 0 || counts.ended_otherwise == 0 || counts.killed_clients == 0) {
    return Internal("a kind of load did not run");
  }
  std::fprintf(stderr, "memory: %ld answered, %ld cancelled or late, %ld clients killed\n",
               static_cast<long>(counts.answered), static_cast<long>(counts.ended_otherwise),
               static_cast<long>(counts.killed_clients));
  Readings readings{*first, *last, 0};
  // What killed clients had under way ends with the check that their connection is gone.
  const Clock::time_point patience = Clock::now() + std::chrono::seconds(60);
  do {
    const std::optional<double> held = MetricSum(Scrape(server.metrics_address()), kHostMemory);
    if (!held.has_value()) return Unavailable("the server's metrics cannot be read");
    readings.host_left_mib = *held / (1 << 20);
    if (readings.host_left_mib == 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  } while (Clock::now() < patience);
  return readings;
}

}  // namespace

void RunMemory(Bench& bench) {
  const double last_seconds = bench.options().soak_seconds;
  const double first_seconds = std::min(kFirstSeconds, last_seconds / 10);
  char moments[96];
  std::snprintf(moments, sizeof(moments), "after %.0f s of mixed load, cancels and disconnects",
                last_seconds);
  char before[32];
  std::snprintf(before, sizeof(before), "after %.0f s", first_seconds);
  const Question resident{"memory",        "resident memory " + std::string(moments),
                          before,          "MiB",
                          Measure::kRatio, kFlatTarget};
  const Question device{"memory",        "device memory " + std::string(moments),
                        before,          "MiB",
                        Measure::kRatio, kFlatTarget};
  const Question left{"memory",
                      "tensor memory held by requests once all have ended",
                      "none",
                      "MiB",
                      Measure::kDifference,
                      Target{Target::Sense::kAtMost, 0}};
  const std::vector<Question> all = {resident, device, left};
  if (!bench.WantsAny(all)) return;  // one load measures all of them
  // Cancelled calls are no news for the log.
  const Result<std::unique_ptr<ServerProcess>> server = bench.StartAttend(
      Serves::kComputing, {"--metrics-listen", "127.0.0.1:0", "--log-level", "error"});
  if (!server.ok()) return bench.AddWithout(all, server.status());
  const Result<Readings> read = Soak(bench, **server, first_seconds);
  if (!read.ok()) return bench.AddWithout(all, read.status());
  bench.Add(Judge(resident, {read->last.resident_mib}, {read->first.resident_mib}));
  if (read->first.device_mib.has_value() && read->last.device_mib.has_value()) {
    bench.Add(Judge(device, {*read->last.device_mib}, {*read->first.device_mib}));
  } else {
    bench.Add(Skipped(device, std::string("the server offers no ") + kDeviceMemory));
  }
  bench.Add(Judge(left, {read->host_left_mib}, {0.0}));
}

}  // namespace attend::bench
