// SPDX-License-Identifier: Apache-2.0
//
// The rows about batches, and about what observing costs.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/bench/service/rows.h"
#include "tests/bench/service/scrape.h"

namespace attend::bench {
namespace {

constexpr Target kBatchesTarget{Target::Sense::kAtLeast, 2};
constexpr Target kMetricsTarget{Target::Sense::kAtLeast, 0.98};
constexpr int kMixedClients = 32;
constexpr int kMixedLengths = 24;
// A few percent are to be told apart.
constexpr int kMetricsRoundsFactor = 2;
constexpr double kCheckedShare = 0.01;

double Calls(const Sample& sample) { return sample.calls_per_second(); }

// Lengths from `low` to `high`, each as much longer than the one before.
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

// Each client all of them, in an order of its own.
std::vector<Script> MixedScripts(const std::vector<std::shared_ptr<Work>>& works, uint64_t seed) {
  Script all;
  for (const std::shared_ptr<Work>& work : works) all.push_back(CallOf(work));
  std::mt19937_64 random(seed);
  std::vector<Script> scripts(kMixedClients, all);
  for (Script& script : scripts) std::shuffle(script.begin(), script.end(), random);
  return scripts;
}

// Whether about the share of `calls` was really checked that the row is about: a server that skips
// its checks would have observing cost nothing. Half of it, as some samples may find the check
// thread busy, and less where so few are expected that chance decides.
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
  const Question question{"batches",
                          "B1 H1 D64 " + std::string(bench.gpu() ? "fp16" : "fp32") + ", L " +
                              std::to_string(low) + " to " + std::to_string(high) + ", " +
                              std::to_string(kMixedClients) + " clients",
                          "one launch per request (--max-batch-requests 1)",
                          "calls/s",
                          Measure::kRatio,
                          kBatchesTarget};
  const Result<std::unique_ptr<ServerProcess>> attend = bench.StartAttend(Serves::kComputing);
  const Result<std::unique_ptr<ServerProcess>> single =
      bench.StartAttend(Serves::kComputing, {"--max-batch-requests", "1"});
  if (!attend.ok()) return bench.AddWithout({question}, attend.status());
  if (!single.ok()) return bench.AddWithout({question}, single.status());
  Connections attend_connections((*attend)->address(), kMixedClients);
  Connections single_connections((*single)->address(), kMixedClients);
  const std::vector<std::shared_ptr<Work>> works = MixedWorks(bench, low, high);
  // A request's bits do not depend on its batch, so one pattern serves for both.
  const Status right = AdmitAll(attend_connections, works);
  if (!right.ok()) return bench.AddWithout({question}, right);
  const std::vector<Script> scripts = MixedScripts(works, bench.options().seed);
  const std::vector<Contestant> contestants = {
      {"attend",
       [&](double seconds) { return Drive(attend_connections, scripts, kMixedClients, seconds); }},
      {"one launch per request",
       [&](double seconds) { return Drive(single_connections, scripts, kMixedClients, seconds); }}};
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout({question}, samples.status());
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Calls);
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
  double on_calls = 0;  // the warm-up's too, as the server counts its checks
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
