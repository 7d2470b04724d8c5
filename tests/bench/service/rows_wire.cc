// SPDX-License-Identifier: Apache-2.0
//
// Small requests compared with the fastest echo that gRPC's callbacks allow and with the echo of
// the other rows, all three in the same rounds.

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/service/latency_driver.h"
#include "tests/bench/service/rows.h"
#include "tests/bench/service/stream_driver.h"

namespace attend::bench {
namespace {

constexpr Target kUnaryTarget{Target::Sense::kAtLeast, 1.0};
constexpr Target kStreamTarget{Target::Sense::kAtLeast, 1.2};
constexpr Target kP50Target{Target::Sense::kAtMost, 0};
constexpr int kCallsOfConnection = 8;
constexpr int kStreamInFlight = 16;

// The order of all arrays by side.
enum Side { kAttend, kInlineEcho, kPlainEcho, kSides };
constexpr std::array<const char*, kSides> kNames = {"attend", "inline echo", "bare echo"};

struct Served {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<Connections> connections;
};

// A kind of traffic, and its figure.
struct Cell {
  std::string text;
  std::string unit;
  Measure measure = Measure::kRatio;
  Target target;
  std::function<double(const Sample&)> of;
  int connections = 1;
  std::string socket;        // prefix of the servers' socket paths; empty: TCP
  int64_t answer_bytes = 0;  // of the echoes
  int sides = kSides;        // number of sides, from the first on
  std::function<Result<Sample>(int side, Connections&, double seconds)> drive;
};

// Starts all servers, with this number of connections each.
Result<std::vector<Served>> ServeAll(const Bench& bench, const std::shared_ptr<Work>& work,
                                     const Cell& cell) {
  std::vector<Served> all;
  for (int side = kAttend; side < cell.sides; ++side) {
    const std::string listen =
        cell.socket.empty() ? "127.0.0.1:0" : "unix:" + cell.socket + std::to_string(side);
    Result<std::unique_ptr<ServerProcess>> process =
        side == kAttend ? bench.StartAttend(Serves::kComputing, {"--listen", listen})
                        : StartEcho(cell.answer_bytes, listen,
                                    side == kInlineEcho ? EchoKind::kInline : EchoKind::kPlain);
    if (!process.ok()) return process.status();
    Served served{std::move(*process), nullptr};
    served.connections = std::make_unique<Connections>(served.process->address(), cell.connections);
    if (side == kAttend) ATTEND_RETURN_IF_ERROR(AdmitAll(*served.connections, {work}));
    all.push_back(std::move(served));
  }
  return all;
}

// A contestant that runs `drive` and measures the processor time of its server.
Contestant Measured(int side, Served& served,
                    std::function<Result<Sample>(Connections&, double)> drive) {
  return {kNames[side], [&served, drive = std::move(drive)](double seconds) -> Result<Sample> {
            const double before = served.process->ProcessorSeconds();
            Result<Sample> sample = drive(*served.connections, seconds);
            if (!sample.ok()) return sample;
            const double used = served.process->ProcessorSeconds() - before;
            sample->server_us =
                1e6 * used / static_cast<double>(std::max<int64_t>(1, sample->calls));
            return sample;
          }};
}

// A figure of a cell, which compares two sides.
struct Pair {
  int side, rival;
  Question question;
  std::function<double(const Sample&)> of;
};

std::vector<Pair> PairsOf(const Cell& cell) {
  std::vector<Pair> pairs;
  const auto add = [&](int rival, std::optional<Target> target) {
    pairs.push_back({kAttend, rival,
                     Question{"wire", cell.text, kNames[rival], cell.unit, cell.measure, target},
                     cell.of});
  };
  add(kInlineEcho, cell.target);
  if (cell.sides > kPlainEcho) add(kPlainEcho, std::nullopt);
  const auto beside = [&](const char* of_what, std::function<double(const Sample&)> of) {
    pairs.push_back({kAttend, kInlineEcho,
                     Question{"wire", cell.text + ", " + of_what, kNames[kInlineEcho], "us",
                              Measure::kRatio, std::nullopt},
                     std::move(of)});
  };
  beside("server's processor time of a call", [](const Sample& s) { return s.server_us; });
  beside("p99", [](const Sample& s) { return s.p99_us; });
  return pairs;
}

void RunCell(Bench& bench, const std::shared_ptr<Work>& work, const Cell& cell) {
  std::vector<Pair> pairs = PairsOf(cell);
  std::vector<Question> questions;
  for (const Pair& pair : pairs) questions.push_back(pair.question);
  if (!bench.WantsAny(questions)) return;
  Result<std::vector<Served>> all = ServeAll(bench, work, cell);
  if (!all.ok()) return bench.AddWithout(questions, all.status());
  std::vector<Contestant> contestants;
  for (int side = kAttend; side < cell.sides; ++side) {
    contestants.push_back(Measured(side, (*all)[static_cast<size_t>(side)],
                                   [&cell, side](Connections& connections, double seconds) {
                                     return cell.drive(side, connections, seconds);
                                   }));
  }
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout(questions, samples.status());
  for (Pair& pair : pairs) {
    bench.AddJudged(std::move(pair.question), (*samples)[static_cast<size_t>(pair.side)],
                    (*samples)[static_cast<size_t>(pair.rival)], pair.of);
  }
}

// Admits the work by a server's answer, as the echoes need its length.
Status Admit(const Bench& bench, const std::shared_ptr<Work>& work) {
  const Result<std::unique_ptr<ServerProcess>> process = bench.StartAttend(Serves::kComputing);
  if (!process.ok()) return process.status();
  Connections connections((*process)->address(), 1);
  return AdmitAll(connections, {work});
}

}  // namespace

void RunWire(Bench& bench) {
  const std::shared_ptr<Work> work = bench.SmallWork();
  const std::string name = work->name();
  const Status admitted = Admit(bench, work);
  if (!admitted.ok()) {
    return bench.AddWithout({{"wire", name, kNames[kInlineEcho], "us", Measure::kRatio, {}}},
                            admitted);
  }
  const std::shared_ptr<const PreparedCall> computed = CallOf(work);
  // The length of the first answer; the lengths differ by a few digits.
  const int64_t answer_bytes = work->answer_bytes();
  const std::shared_ptr<const PreparedCall> echoed = EchoCallOf(work, answer_bytes);
  const auto call_of = [&](int side) { return side == kAttend ? computed : echoed; };
  const auto calls = [](const Sample& sample) { return sample.calls_per_second(); };
  const auto p50 = [](const Sample& sample) { return sample.p50_us; };

  const int in_flight = bench.options().clients;
  const int connections = std::max(1, in_flight / kCallsOfConnection);
  RunCell(bench, work,
          {name + ", " + std::to_string(in_flight) + " in flight on " +
               std::to_string(connections) + " connections",
           "calls/s", Measure::kRatio, kUnaryTarget, calls, connections, "", answer_bytes, kSides,
           [&](int side, Connections& to, double seconds) {
             return Drive(to, {Script{call_of(side)}}, in_flight, seconds);
           }});
  const TempFolder folder;
  for (const bool unix_socket : {false, true}) {
    RunCell(bench, work,
            {name + ", 1 caller, " + (unix_socket ? "Unix socket" : "TCP") + ", p50", "us",
             Measure::kDifference, kP50Target, p50, 1, unix_socket ? folder.Path("s") : "",
             answer_bytes, kSides, [&](int side, Connections& to, double seconds) {
               return DriveLatency(to, *call_of(side), /*less_own_work=*/false, seconds);
             }});
  }
  std::array<std::vector<StreamScripts>, 2> scripts;
  scripts[0].push_back(StreamScriptsOf(work, kStreamInFlight));
  scripts[1].emplace_back();
  for (int i = 0; i < kStreamInFlight; ++i) {
    auto call = std::make_shared<PreparedCall>(*echoed);
    call->request = work->Message(StreamId(i));
    scripts[1].back().push_back({std::move(call)});
  }
  RunCell(bench, work,
          {name + ", one stream, " + std::to_string(kStreamInFlight) + " in flight", "calls/s",
           Measure::kRatio, kStreamTarget, calls, 1, "", answer_bytes, kInlineEcho + 1,
           [&](int side, Connections& to, double seconds) {
             return DriveStreams(to, scripts[side == kAttend ? 0 : 1], 1, seconds);
           }});
}

}  // namespace attend::bench
