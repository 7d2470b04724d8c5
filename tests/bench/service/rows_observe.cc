// SPDX-License-Identifier: Apache-2.0
//
// The row about the access log and spans for a collector.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/service/rows.h"
#include "tests/bench/service/scrape.h"

namespace attend::bench {
namespace {

constexpr Target kTarget{Target::Sense::kAtLeast, 0.98};  // with a share of 0.01
// More rounds, as differences of a few percent have to be detected.
constexpr int kRoundsFactor = 2;
constexpr char kLines[] = "attend_access_log_lines_total";
constexpr char kSpans[] = "attend_spans_total";

// A kind of observation, and the metric family that counts its output.
struct Way {
  const char* name;
  const char* family;
  const char* outcome;
  std::optional<Target> target;
  std::vector<std::string> flags;
};

std::vector<Way> Ways(const TempFolder& folder, const std::string& collector) {
  const auto log = [&](const char* file, const char* share) -> std::vector<std::string> {
    return {"--access-log", folder.Path(file), "--access-log-rate", "0", "--access-log-sample",
            share};
  };
  const auto spans = [&](const char* share) -> std::vector<std::string> {
    return {"--otlp-endpoint", collector, "--otlp-sample", share};
  };
  return {{"access log of 1 % of calls", kLines, "written", kTarget, log("some.log", "0.01")},
          {"access log of all calls", kLines, "written", std::nullopt, log("all.log", "1")},
          {"spans of 1 % of calls", kSpans, "exported", kTarget, spans("0.01")},
          {"spans of all calls", kSpans, "exported", std::nullopt, spans("1")}};
}

// A server with one kind of observation, or without any.
struct Observed {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<Connections> connections;
};

Result<Observed> Start(const Bench& bench, std::vector<std::string> flags,
                       const std::shared_ptr<Work>& work) {
  flags.insert(flags.end(), {"--metrics-listen", "127.0.0.1:0"});
  Result<std::unique_ptr<ServerProcess>> process =
      bench.StartAttend(Serves::kComputing, std::move(flags));
  if (!process.ok()) return process.status();
  Observed made;
  made.process = std::move(*process);
  made.connections =
      std::make_unique<Connections>(made.process->address(), bench.options().clients);
  ATTEND_RETURN_IF_ERROR(AdmitAll(*made.connections, {work}));
  return made;
}

// Requires that the server has written, as observation would look free otherwise.
Status JudgeWritten(const Observed& observed, const Way& way) {
  const std::string outcome = "outcome=\"" + std::string(way.outcome) + "\"";
  const double written =
      MetricSum(Scrape(observed.process->metrics_address()), way.family, outcome).value_or(0);
  if (written > 0) return Status();
  return Internal(std::string(way.family) + "{" + outcome + "} is 0");
}

Status Measured(Bench& bench, const std::shared_ptr<Work>& work, const std::vector<Way>& ways,
                const std::vector<Question>& questions) {
  std::vector<Observed> servers;
  for (size_t n = 0; n <= ways.size(); ++n) {
    Result<Observed> started =
        Start(bench, n < ways.size() ? ways[n].flags : std::vector<std::string>(), work);
    if (!started.ok()) return started.status();
    servers.push_back(std::move(*started));
  }
  const int clients = bench.options().clients;
  const std::vector<Script> scripts = {Script{CallOf(work)}};
  std::vector<Contestant> contestants;
  for (size_t n = 0; n < servers.size(); ++n) {
    contestants.push_back({n < ways.size() ? ways[n].name : "off",
                           [&scripts, &to = *servers[n].connections, clients](double seconds) {
                             return Drive(to, scripts, clients, seconds);
                           }});
  }
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, kRoundsFactor * bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return samples.status();
  const auto calls = [](const Sample& sample) { return sample.calls_per_second(); };
  for (size_t n = 0; n < ways.size(); ++n) {
    const Status written = JudgeWritten(servers[n], ways[n]);
    if (!written.ok()) {
      bench.AddWithout({questions[n]}, written);
    } else {
      bench.AddJudged(questions[n], (*samples)[n], samples->back(), calls);
    }
  }
  return Status();
}

}  // namespace

void RunObserve(Bench& bench) {
  const std::shared_ptr<Work> work = bench.SmallWork();
  const TempFolder folder;
  const Result<std::unique_ptr<ServerProcess>> collector = StartEcho(0, "127.0.0.1:0");
  const std::vector<Way> ways = Ways(folder, collector.ok() ? (*collector)->address() : "");
  std::vector<Question> questions;
  for (const Way& way : ways) {
    questions.push_back(
        {"observe",
         work->name() + ", " + std::to_string(bench.options().clients) + " clients, " + way.name,
         "neither", "calls/s", Measure::kRatio, way.target});
  }
  if (!bench.WantsAny(questions)) return;
  const Status status =
      collector.ok() ? Measured(bench, work, ways, questions) : Status(collector.status());
  if (!status.ok()) bench.AddWithout(questions, status);
}

}  // namespace attend::bench
