// SPDX-License-Identifier: Apache-2.0
//
// The rows about batches and about the cost of observability.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/memory/shared_memory.h"
#include "tests/bench/service/rows.h"
#include "tests/bench/service/scrape.h"
#include "tests/bench/service/shared_scripts.h"
#include "tests/bench/service/stream_driver.h"

namespace attend::bench {
namespace {

constexpr Target kBatchesTarget{Target::Sense::kAtLeast, 2};
constexpr Target kMetricsTarget{Target::Sense::kAtLeast, 0.98};
constexpr int kMixedClients = 32;
constexpr int kMixedLengths = 24;
constexpr int kMixedInFlight = 8;  // per client, on its stream
// More rounds, as differences of a few percent have to be detected.
constexpr int kMetricsRoundsFactor = 2;
constexpr double kCheckedShare = 0.01;

double Calls(const Sample& sample) { return sample.calls_per_second(); }

// Works with lengths from `low` to `high` in geometric progression.
std::vector<std::shared_ptr<Work>> MixedWorks(const Bench& bench, int64_t low, int64_t high) {
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < kMixedLengths; ++i) {
    const double share = static_cast<double>(i) / (kMixedLengths - 1);
    const auto length = static_cast<int64_t>(
        std::lround(static_cast<double>(low) * std::pow(static_cast<double>(high) / low, share)));
    const DType dtype = bench.gpu() ? DType::kFloat16 : DType::kFloat32;
    works.push_back(std::make_shared<Work>("L" + std::to_string(length),
                                           test::MakeSpec(1, 1, 1, length, length, 64, 64, dtype),
                                           Truth::kAttention, bench.options().seed + i));
  }
  return works;
}

// A server, the inline calls, and the calls with shared memory: per client, a script for each
// request in flight on a stream, of which the first is used for unary calls too.
struct Mixed {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<Connections> connections;
  std::vector<Script> inlined;
  std::shared_ptr<client::SharedMemory> memory;
  std::vector<Script> placed;
  std::vector<StreamScripts> streamed;
};

// Makes each of a client's calls once, and checks the bytes of every answer.
Status CheckScripts(Connections& connections, const std::vector<Script>& scripts) {
  BlockingCaller caller(connections);
  for (const Script& script : scripts) {
    for (const std::shared_ptr<const PreparedCall>& call : script) {
      const Result<grpc::ByteBuffer> answer = caller.Call(call->request);
      if (!answer.ok()) return answer.status();
      const std::string wrong = call->verify(*answer, /*bytes_too=*/true);
      if (!wrong.empty()) return Internal(wrong);
    }
  }
  return Status();
}

// Each client sends all works in a different order. The bits of an answer do not depend on the
// batch, so that all servers share a work's pattern.
Result<Mixed> StartMixed(const Bench& bench, const std::string& socket,
                         const std::vector<std::shared_ptr<Work>>& works,
                         const std::vector<std::string>& more_flags) {
  std::vector<std::string> flags = {"--shared-memory", "--shared-memory-socket", socket};
  flags.insert(flags.end(), more_flags.begin(), more_flags.end());
  Result<std::unique_ptr<ServerProcess>> process =
      bench.StartAttend(Serves::kComputing, std::move(flags));
  if (!process.ok()) return process.status();
  Mixed mixed;
  mixed.process = std::move(*process);
  mixed.connections = std::make_unique<Connections>(mixed.process->address(), kMixedClients);
  ATTEND_RETURN_IF_ERROR(AdmitAll(*mixed.connections, works));
  Result<std::shared_ptr<client::SharedMemory>> memory = client::SharedMemory::Connect({socket});
  if (!memory.ok()) return memory.status();
  mixed.memory = std::move(*memory);
  Script all;
  for (const std::shared_ptr<Work>& work : works) all.push_back(CallOf(work));
  std::mt19937_64 random(bench.options().seed);
  for (int i = 0; i < kMixedClients; ++i) {
    Result<StreamScripts> scripts = ShareScripts(*mixed.memory, works, kMixedInFlight);
    if (!scripts.ok()) return scripts.status();
    if (i == 0) ATTEND_RETURN_IF_ERROR(CheckScripts(*mixed.connections, *scripts));
    for (Script& script : *scripts) std::shuffle(script.begin(), script.end(), random);
    std::shuffle(all.begin(), all.end(), random);
    mixed.inlined.push_back(all);
    mixed.placed.push_back(scripts->front());
    mixed.streamed.push_back(std::move(*scripts));
  }
  return mixed;
}

using DriveMixed = std::function<Result<Sample>(Mixed& mixed, double seconds)>;
void RaceMixed(Bench& bench, const Question& question, Mixed& attend, Mixed& single,
               const DriveMixed& drive) {
  if (!bench.Wants(question)) return;
  const std::vector<Contestant> contestants = {
      {"attend", [&](double seconds) { return drive(attend, seconds); }},
      {"one launch per request", [&](double seconds) { return drive(single, seconds); }}};
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout({question}, samples.status());
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Calls);
}

// Requires that the server has checked the expected share of `calls`, as skipped checks would make
// observability look free: at least half of it, as the check thread may be busy for some samples,
// less a margin for chance.
Status JudgeChecked(const std::string& metrics, double calls) {
  const auto sum = [&](const std::string& result) {
    return MetricSum(metrics, "attend_reference_checks_total", "result=\"" + result + "\"")
        .value_or(0);
  };
  const double checked = sum("ok") + sum("failed");
  const double expected = kCheckedShare * calls;
  if (checked >= std::max(1.0, expected / 2 - std::sqrt(expected))) return Status();
  char text[160];
  std::snprintf(text, sizeof(text),
                "%.0f of %.0f answers were checked, %.2f %% instead of %.0f %%, and %.0f skipped",
                checked, calls, 100 * checked / std::max(1.0, calls), 100 * kCheckedShare,
                sum("skipped"));
  return Internal(text);
}

}  // namespace

void RunBatches(Bench& bench) {
  const int64_t low = bench.gpu() ? 64 : 16;
  const int64_t high = bench.gpu() ? 4096 : 256;
  const auto question = [&](const std::string& how, std::optional<Target> target) {
    return Question{"batches",
                    "B1 H1 D64 " + std::string(bench.gpu() ? "fp16" : "fp32") + ", L " +
                        std::to_string(low) + " to " + std::to_string(high) + ", " +
                        std::to_string(kMixedClients) + " clients, " + how,
                    "one launch per request (--max-batch-requests 1)",
                    "calls/s",
                    Measure::kRatio,
                    target};
  };
  const Question placed = question("inputs and answer in shared memory", kBatchesTarget);
  // Inline, the wire limits both sides.
  const Question inlined = question("inline bytes", std::nullopt);
  const Question streamed = question(
      "shared memory, AttendStream, " + std::to_string(kMixedInFlight) + " in flight a client",
      kBatchesTarget);
  if (!bench.WantsAny({placed, inlined, streamed})) return;
  const TempFolder folder;
  const std::vector<std::shared_ptr<Work>> works = MixedWorks(bench, low, high);
  Result<Mixed> attend = StartMixed(bench, folder.Path("attend.sock"), works, {});
  Result<Mixed> single =
      StartMixed(bench, folder.Path("single.sock"), works, {"--max-batch-requests", "1"});
  for (const Result<Mixed>* side : {&attend, &single}) {
    if (!side->ok()) return bench.AddWithout({placed, inlined, streamed}, side->status());
  }
  RaceMixed(bench, placed, *attend, *single, [](Mixed& mixed, double seconds) {
    return Drive(*mixed.connections, mixed.placed, kMixedClients, seconds);
  });
  RaceMixed(bench, inlined, *attend, *single, [](Mixed& mixed, double seconds) {
    return Drive(*mixed.connections, mixed.inlined, kMixedClients, seconds);
  });
  RaceMixed(bench, streamed, *attend, *single, [](Mixed& mixed, double seconds) {
    return DriveStreams(*mixed.connections, mixed.streamed, kMixedClients, seconds);
  });
}

void RunMetrics(Bench& bench) {
  const int clients = bench.options().clients;
  const std::shared_ptr<Work> work = bench.SmallWork();
  const Question question{"metrics",
                          work->name() + ", " + std::to_string(clients) +
                              " clients, metrics scraped every second, 1 % of answers checked",
                          "no endpoint, no checks",
                          "calls/s",
                          Measure::kRatio,
                          kMetricsTarget};
  if (!bench.Wants(question)) return;
  const Result<std::unique_ptr<ServerProcess>> on = bench.StartAttend(
      Serves::kComputing, {"--metrics-listen", "127.0.0.1:0", "--reference-check", "sample:0.01"});
  const Result<std::unique_ptr<ServerProcess>> off = bench.StartAttend(Serves::kComputing);
  if (!on.ok()) return bench.AddWithout({question}, on.status());
  if (!off.ok()) return bench.AddWithout({question}, off.status());
  Connections on_connections((*on)->address(), clients);
  Connections off_connections((*off)->address(), clients);
  const Status right = AdmitAll(on_connections, {work});
  if (!right.ok()) return bench.AddWithout({question}, right);
  const std::vector<Script> scripts = {Script{CallOf(work)}};
  double on_calls = 0;  // including the warm-up, whose checks the server counts too
  const std::vector<Contestant> contestants = {
      {"on",
       [&](double seconds) {
         Result<Sample> sample = Drive(on_connections, scripts, clients, seconds);
         if (sample.ok()) on_calls += static_cast<double>(sample->calls);
         return sample;
       }},
      {"off", [&](double seconds) { return Drive(off_connections, scripts, clients, seconds); }}};
  const Scraper scraper((*on)->metrics_address());
  const Result<std::vector<Samples>> samples = RunRounds(
      contestants, kMetricsRoundsFactor * bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout({question}, samples.status());
  if (scraper.scrapes() == 0) return bench.AddWithout({question}, Internal("nothing was scraped"));
  const Status checked = JudgeChecked(Scrape((*on)->metrics_address()), on_calls);
  if (!checked.ok()) return bench.AddWithout({question}, checked);
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Calls);
}

}  // namespace attend::bench
