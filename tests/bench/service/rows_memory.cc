// SPDX-License-Identifier: Apache-2.0
//
// The row about memory over time.

#include <algorithm>
#include <chrono>
#include <cmath>
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
constexpr char kRegionMemory[] = "attend_shared_memory_bytes";
constexpr char kSessionMemory[] = "attend_session_memory_bytes";
constexpr char kSessions[] = "attend_sessions";
// Less than the load's, so that it evicts; a CPU's is all resident soon. One work's K and V fit.
constexpr char kSessionMemoryCpu[] = "32MiB";
constexpr char kSessionMemoryGpu[] = "256MiB";
constexpr double kLineSeconds = 60;  // between lines about how far it is
constexpr double kMib = 1 << 20;

struct Memory {
  // Without the regions of shared memory: how many there are at a moment is the clients' doing.
  double resident_mib = 0;
  double regions_mib = 0;
  std::optional<double> device_mib;  // if the server measures it
};

Result<Memory> ReadOnce(const ServerProcess& server) {
  const std::string metrics = Scrape(server.metrics_address());
  const int64_t bytes = server.resident_bytes();
  if (bytes < 0) return Unavailable("the server is gone");
  const std::optional<double> regions = MetricSum(metrics, kRegionMemory);
  if (!regions.has_value()) return Unavailable("the server's metrics cannot be read");
  Memory memory;
  memory.regions_mib = *regions / kMib;
  memory.resident_mib = static_cast<double>(bytes) / kMib - memory.regions_mib;
  const std::optional<double> device = MetricSum(metrics, kDeviceMemory);
  if (device.has_value()) memory.device_mib = *device / kMib;
  return memory;
}

// The median of some readings around one moment: requests come and go.
Result<Memory> ReadMemory(const ServerProcess& server) {
  constexpr int kReadings = 9;
  std::vector<double> resident;
  std::vector<double> regions;
  std::vector<double> device;
  for (int i = 0; i < kReadings; ++i) {
    const Result<Memory> read = ReadOnce(server);
    if (!read.ok()) return read.status();
    resident.push_back(read->resident_mib);
    regions.push_back(read->regions_mib);
    if (read->device_mib.has_value()) device.push_back(*read->device_mib);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  Memory memory;
  memory.resident_mib = Median(resident);
  memory.regions_mib = Median(regions);
  if (!device.empty()) memory.device_mib = Median(device);
  return memory;
}

// The time since a load's start. Tells every minute how far it is: a run that is cut short has then
// said something.
class Watch {
 public:
  Watch(const ServerProcess& server, const SoakLoad& load) : server_(server), load_(load) {}

  // Returns early, within a minute, after a fault.
  void SleepUntil(double seconds) {
    for (; next_line_seconds_ < seconds; next_line_seconds_ += kLineSeconds) {
      if (!load_.fault().empty()) return;
      Sleep(next_line_seconds_);
      Tell();
    }
    Sleep(seconds);
  }

  void Tell() const {
    const SoakLoad::Counts counts = load_.counts();
    const std::chrono::duration<double> elapsed = Clock::now() - begin_;
    const Result<Memory> memory = ReadOnce(server_);
    std::string line = "memory: " + std::to_string(std::lround(elapsed.count())) + " s, " +
                       (memory.ok() ? Text(*memory) : memory.status().message());
    for (const auto& [count, what] : {std::pair{counts.answered, "answered"},
                                      {counts.ended_otherwise, "cancelled or late"},
                                      {counts.regions, "regions made"},
                                      {counts.region_answers, "answered in them"},
                                      {counts.killed_clients, "clients killed"},
                                      {counts.sessions, "sessions"},
                                      {counts.session_answers, "answered over them"},
                                      {counts.dropped_sessions, "dropped"}}) {
      line += ", " + std::to_string(count) + " " + what;
    }
    const std::string fault = load_.fault();
    if (!fault.empty()) line += "; fault: " + fault;
    std::fprintf(stderr, "%s\n", line.c_str());
    std::fflush(stderr);
  }

 private:
  static std::string Text(const Memory& memory) {
    const auto mib = [](double value) { return std::to_string(std::lround(value)) + " MiB"; };
    return "resident " + mib(memory.resident_mib) + " and regions of " + mib(memory.regions_mib) +
           (memory.device_mib.has_value() ? ", device " + mib(*memory.device_mib) : "");
  }

  void Sleep(double until_seconds) const {
    const std::chrono::duration<double> after(until_seconds);
    std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<Clock::duration>(after));
  }

  const ServerProcess& server_;
  const SoakLoad& load_;
  const Clock::time_point begin_ = Clock::now();
  double next_line_seconds_ = kLineSeconds;
};

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
  // Held once all have ended: by requests, of shared memory, and by sessions.
  double host_left_mib = 0;
  double regions_left_mib = 0;
  double sessions_left_mib = 0;
};

// What killed clients had under way ends with the check that their connection is gone, sessions
// that nobody freed with their leases.
Status WaitUntilNothingIsHeld(const ServerProcess& server, Readings& readings) {
  const Clock::time_point patience = Clock::now() + std::chrono::seconds(60);
  do {
    const std::string metrics = Scrape(server.metrics_address());
    const std::optional<double> host = MetricSum(metrics, kHostMemory);
    const std::optional<double> regions = MetricSum(metrics, kRegionMemory);
    const std::optional<double> pages = MetricSum(metrics, kSessionMemory, "state=\"used\"");
    const std::optional<double> sessions = MetricSum(metrics, kSessions);
    if (!host.has_value() || !regions.has_value() || !pages.has_value() || !sessions.has_value()) {
      return Unavailable("the server's metrics cannot be read");
    }
    readings.host_left_mib = *host / kMib;
    readings.regions_left_mib = *regions / kMib;
    readings.sessions_left_mib = *pages / kMib;
    if (*host == 0 && *regions == 0 && *pages == 0 && *sessions == 0) return Status();
    if (Clock::now() >= patience && *sessions > 0) {
      return Internal(std::to_string(std::lround(*sessions)) + " sessions outlive their leases");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  } while (Clock::now() < patience);
  return Status();
}

Result<Readings> Soak(Bench& bench, const ServerProcess& server, const std::string& socket,
                      double first_seconds) {
  SoakLoad load(server.address(), socket, SoakWorks(bench), bench.options().seed);
  Watch watch(server, load);
  watch.SleepUntil(first_seconds);
  const Result<Memory> first = ReadMemory(server);
  watch.SleepUntil(bench.options().soak_seconds);
  const Result<Memory> last = ReadMemory(server);
  watch.Tell();
  load.Stop();
  if (!load.fault().empty()) return Internal(load.fault());
  if (!first.ok()) return first.status();
  if (!last.ok()) return last.status();
  const SoakLoad::Counts counts = load.counts();
  if (counts.answered == 0 || counts.ended_otherwise == 0 || counts.regions == 0 ||
      counts.region_answers == 0 || counts.killed_clients == 0 || counts.session_answers == 0 ||
      counts.dropped_sessions == 0) {
    return Internal("a kind of load did not run");
  }
  Readings readings{*first, *last};
  ATTEND_RETURN_IF_ERROR(WaitUntilNothingIsHeld(server, readings));
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
  const Question resident{
      "memory",        "resident memory, shared regions apart, " + std::string(moments),
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
  Question regions_left = left;
  regions_left.work = "shared memory held by regions once all clients have gone";
  Question sessions_left = left;
  sessions_left.work = "memory held by sessions once all leases are over";
  const std::vector<Question> all = {resident, device, left, regions_left, sessions_left};
  if (!bench.WantsAny(all)) return;  // one load measures all of them
  const TempFolder folder;
  const std::string socket = folder.Path("shared.sock");
  // Cancelled calls are no news for the log.
  const Result<std::unique_ptr<ServerProcess>> server = bench.StartAttend(
      Serves::kComputing, {"--metrics-listen", "127.0.0.1:0", "--log-level", "error",
                           "--shared-memory", "--shared-memory-socket", socket, "--session-memory",
                           bench.gpu() ? kSessionMemoryGpu : kSessionMemoryCpu});
  if (!server.ok()) return bench.AddWithout(all, server.status());
  const Result<Readings> read = Soak(bench, **server, socket, first_seconds);
  if (!read.ok()) return bench.AddWithout(all, read.status());
  bench.Add(Judge(resident, {read->last.resident_mib}, {read->first.resident_mib}));
  if (read->first.device_mib.has_value() && read->last.device_mib.has_value()) {
    bench.Add(Judge(device, {*read->last.device_mib}, {*read->first.device_mib}));
  } else {
    bench.Add(Skipped(device, std::string("the server offers no ") + kDeviceMemory));
  }
  bench.Add(Judge(left, {read->host_left_mib}, {0.0}));
  bench.Add(Judge(regions_left, {read->regions_left_mib}, {0.0}));
  bench.Add(Judge(sessions_left, {read->sessions_left_mib}, {0.0}));
}

}  // namespace attend::bench
