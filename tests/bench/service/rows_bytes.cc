// SPDX-License-Identifier: Apache-2.0
//
// The rows about throughput.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "tests/bench/service/chunked_driver.h"
#include "tests/bench/service/pinned_copies.h"
#include "tests/bench/service/raw_tcp.h"
#include "tests/bench/service/rows.h"

namespace attend::bench {
namespace {

constexpr Target kBareTarget{Target::Sense::kAtLeast, 0.9};
constexpr Target kRawTarget{Target::Sense::kAtLeast, 0.5};
constexpr char kCopies[] = "page-locked copies over PCIe, both ways at once";
constexpr int kChunkedConnections = 8;
// The chunk size of the client library.
constexpr int64_t kClientChunkBytes = int64_t{2} << 20;

double Gigabytes(const Sample& sample) { return sample.gigabytes_per_second(); }

std::string Mebibytes(int64_t bytes) {
  return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MiB"
                          : std::to_string(bytes >> 10) + " KiB";
}

// Calls in flight per connection: several, for throughput, within the server's memory. More for
// small messages, which would measure wake-ups otherwise.
int InFlight(const Work& work) {
  constexpr int64_t kBytes = int64_t{40} << 20;
  constexpr int64_t kCallsMax = 4;
  constexpr int64_t kSmallBytes = int64_t{1} << 20;
  constexpr int64_t kSmallCallsMax = 16;
  const int64_t calls_max = work.input_bytes() <= kSmallBytes ? kSmallCallsMax : kCallsMax;
  return static_cast<int>(std::clamp<int64_t>(kBytes / work.input_bytes(), 1, calls_max));
}

std::string OnDevice(const Bench& bench) { return bench.passes_through() ? ", no kernel" : ""; }

Question InlineQuestion(const Bench& bench, const Work& work, int connections, const char* against,
                        const Target& target) {
  const int in_flight = InFlight(work);
  return {"inline",
          work.name() + OnDevice(bench) + ", " + std::to_string(connections) +
              (connections == 1 ? " connection" : " connections") + " x " +
              std::to_string(in_flight) + " in flight",
          against,
          "GB/s",
          Measure::kRatio,
          target};
}

Contestant UnaryContestant(const char* name, const std::shared_ptr<Connections>& connections,
                           std::shared_ptr<const PreparedCall> call, int in_flight) {
  return {name, [=](double seconds) {
            return Drive(*connections, {Script{call}}, in_flight * connections->count(), seconds);
          }};
}

// Races a work over each number of connections; `rival` makes the other contestant.
using MakeRival = std::function<Result<Contestant>(int connections, int in_flight)>;
void RaceInline(Bench& bench, const std::vector<int>& counts, const ServerProcess& attend,
                const std::shared_ptr<Work>& work, const char* against, const Target& target,
                const MakeRival& rival) {
  for (const int count : counts) {
    const Question question = InlineQuestion(bench, *work, count, against, target);
    if (!bench.Wants(question)) continue;
    const int in_flight = InFlight(*work);
    const auto connections = std::make_shared<Connections>(attend.address(), count);
    const Result<Contestant> other = rival(count, in_flight);
    if (!other.ok()) {
      bench.AddWithout({question}, other.status());
      continue;
    }
    const std::vector<Contestant> contestants = {
        UnaryContestant("attend", connections, CallOf(work), in_flight), *other};
    const Result<std::vector<Samples>> samples =
        RunRounds(contestants, bench.options().rounds, bench.options().seconds);
    if (samples.ok()) {
      bench.AddJudged(question, (*samples)[0], (*samples)[1], Gigabytes);
    } else {
      bench.AddWithout({question}, samples.status());
    }
  }
}

// Against bare gRPC, which answers with as many bytes as attend.
void RaceBare(Bench& bench, const std::vector<int>& counts, const ServerProcess& attend,
              const std::shared_ptr<Work>& work) {
  const Result<std::unique_ptr<ServerProcess>> echo = StartEcho(work->answer_bytes());
  RaceInline(bench, counts, attend, work, "bare gRPC, same bytes each way", kBareTarget,
             [&](int count, int in_flight) -> Result<Contestant> {
               if (!echo.ok()) return echo.status();
               return UnaryContestant("bare gRPC",
                                      std::make_shared<Connections>((*echo)->address(), count),
                                      EchoCallOf(work, work->answer_bytes()), in_flight);
             });
}

// Against raw TCP without answers.
void RaceRaw(Bench& bench, const std::vector<int>& counts, const ServerProcess& attend,
             const std::shared_ptr<Work>& work) {
  const Result<std::unique_ptr<ServerProcess>> server =
      ServerProcess::Start(ServeCommand("raw-tcp", {}));
  RaceInline(
      bench, counts, attend, work, "raw TCP, one way", kRawTarget,
      [&](int count, int in_flight) -> Result<Contestant> {
        if (!server.ok()) return server.status();
        RawTcpLoad load;
        load.up_bytes = static_cast<int64_t>(work->Message().Length());
        load.connections = count;
        load.in_flight = in_flight;
        Result<std::unique_ptr<RawTcpClient>> client =
            RawTcpClient::Connect((*server)->address(), load);
        if (!client.ok()) return client.status();
        const std::shared_ptr<RawTcpClient> shared = std::move(*client);
        return Contestant{"raw TCP", [shared](double seconds) { return shared->Drive(seconds); }};
      });
}

// The same bytes in chunks of the client library's size.
RawTcpLoad ChunkedRawLoad(const Work& work) {
  RawTcpLoad load;
  load.up_bytes = work.input_bytes();
  load.down_bytes = work.output_bytes();
  load.connections = kChunkedConnections;
  load.together = true;
  load.chunk_bytes = kClientChunkBytes;
  return load;
}

}  // namespace

void RunInline(Bench& bench) {
  const std::vector<int> counts =
      bench.options().quick ? std::vector<int>{1, 8} : std::vector<int>{1, 4, 8, 16};
  const auto work = [&](const char* name, int64_t heads, int64_t len_q, int64_t len_k) {
    return bench.TransferWork(
        name, test::MakeSpec(1, heads, heads, len_q, len_k, 128, 128, DType::kFloat16));
  };
  // Q is a quarter of the bytes, and so is the answer.
  std::vector<std::shared_ptr<Work>> both_ways = {work("64 KiB in, 16 KiB out", 1, 64, 96)};
  if (!bench.options().quick) both_ways.push_back(work("1 MiB in, 256 KiB out", 1, 1024, 1536));
  both_ways.push_back(work("16 MiB in, 4 MiB out", 8, 2048, 3072));
  const std::shared_ptr<Work> one_way = work("16 MiB in, 16 KiB out", 8, 8, 4096);

  const Result<std::unique_ptr<ServerProcess>> attend = bench.StartAttend(Serves::kTransfers);
  Status status = attend.ok() ? Status() : attend.status();
  if (status.ok()) {
    Connections connections((*attend)->address(), 1);
    std::vector<std::shared_ptr<Work>> all = both_ways;
    all.push_back(one_way);
    status = AdmitAll(connections, all);
  }
  if (!status.ok()) {
    // Even if this cell is not selected.
    bench.Add(Failed(InlineQuestion(bench, *one_way, 1, "raw TCP, one way", kRawTarget),
                     status.ToString()));
    return;
  }
  for (const std::shared_ptr<Work>& each : both_ways) RaceBare(bench, counts, **attend, each);
  RaceRaw(bench, counts, **attend, one_way);
}

void RunChunked(Bench& bench) {
  const int64_t length = bench.options().quick ? 4096 : 16384;
  const std::shared_ptr<Work> work =
      bench.TransferWork("16 heads x " + std::to_string(length) + " x 128 fp16",
                         test::MakeSpec(1, 16, 16, length, length, 128, 128, DType::kFloat16));
  const Question question{"chunked",
                          Mebibytes(work->input_bytes()) + " in, " +
                              Mebibytes(work->output_bytes()) + " out, " + work->name() +
                              OnDevice(bench) + ", one at a time, 8 connections",
                          "raw TCP, 8 connections, there and back",
                          "GB/s",
                          Measure::kRatio,
                          kRawTarget};
  // Compares with the bus for information; the row of shared memory has the target.
  Question bus_question = question;
  bus_question.against = kCopies;
  bus_question.target.reset();
  const bool with_raw = bench.Wants(question);
  const bool with_bus = !bench.passes_through() && bench.Wants(bus_question);
  if (!with_raw && !with_bus) return;
  const std::vector<Question> asked = {with_raw ? question : bus_question};
  const Result<std::unique_ptr<ServerProcess>> attend = bench.StartAttend(Serves::kTransfers);
  const Result<std::unique_ptr<ServerProcess>> raw =
      ServerProcess::Start(ServeCommand("raw-tcp", {}));
  if (!attend.ok()) return bench.AddWithout(asked, attend.status());
  if (!raw.ok()) return bench.AddWithout(asked, raw.status());
  const Result<std::unique_ptr<RawTcpClient>> rival =
      RawTcpClient::Connect((*raw)->address(), ChunkedRawLoad(*work));
  const Result<std::unique_ptr<client::Client>> client =
      ConnectChunked((*attend)->address(), kChunkedConnections);
  if (!rival.ok()) return bench.AddWithout(asked, rival.status());
  if (!client.ok()) return bench.AddWithout(asked, client.status());
  std::vector<Contestant> contestants = {
      {"attend", [&](double seconds) { return DriveChunked(**client, *work, seconds); }}};
  if (with_raw) {
    contestants.push_back({"raw TCP", [&](double seconds) { return (*rival)->Drive(seconds); }});
  }
  Result<std::unique_ptr<PinnedCopies>> bus = Unimplemented("this needs a GPU");
  if (with_bus) {
    bus = PinnedCopies::Make(bench.first_device(), work->input_bytes(), work->output_bytes());
    if (!bus.ok()) return bench.AddWithout(asked, bus.status());
    contestants.push_back({"copies", [&](double seconds) { return (*bus)->Drive(seconds); }});
  }
  // Answers are discarded while they are timed, so others are checked before and after.
  Status right = CheckChunked(**client, *work);
  if (!right.ok()) return bench.AddWithout(asked, right);
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  right = samples.ok() ? CheckChunked(**client, *work) : samples.status();
  if (!right.ok()) return bench.AddWithout(asked, right);
  if (with_raw) bench.AddJudged(question, (*samples)[0], (*samples)[1], Gigabytes);
  if (with_bus) bench.AddJudged(bus_question, (*samples)[0], samples->back(), Gigabytes);
}

}  // namespace attend::bench
