// SPDX-License-Identifier: Apache-2.0
//
// The rows about small requests.

#include <google/protobuf/descriptor.pb.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "tests/bench/service/latency_driver.h"
#include "tests/bench/service/rows.h"
#include "tests/bench/service/stream_driver.h"

namespace attend::bench {
namespace {

constexpr Target kEchoTarget{Target::Sense::kAtLeast, 0.8};
constexpr Target kPythonTarget{Target::Sense::kAtLeast, 10};
constexpr Target kStreamTarget{Target::Sense::kAtLeast, 2.5};
constexpr Target kAddedP50Target{Target::Sense::kAtMost, 30};
constexpr Target kAddedP99Target{Target::Sense::kAtMost, 100};
constexpr int kStreamInFlight = 16;

double Calls(const Sample& sample) { return sample.calls_per_second(); }

// A server, a connection per client, and the call that each client makes.
struct Side {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<Connections> connections;
  std::shared_ptr<const PreparedCall> call;
};

// Checks the server's first answer in full.
Result<Side> ConnectComputing(Result<std::unique_ptr<ServerProcess>> process,
                              const std::shared_ptr<Work>& work, int connections) {
  if (!process.ok()) return process.status();
  Side side;
  side.process = std::move(*process);
  side.connections = std::make_unique<Connections>(side.process->address(), connections);
  ATTEND_RETURN_IF_ERROR(AdmitAll(*side.connections, {work}));
  side.call = CallOf(work);
  return side;
}

Result<Side> ConnectEcho(const std::shared_ptr<Work>& work, int connections,
                         const std::string& listen = "127.0.0.1:0") {
  Result<std::unique_ptr<ServerProcess>> process = StartEcho(work->answer_bytes(), listen);
  if (!process.ok()) return process.status();
  Side side;
  side.process = std::move(*process);
  side.connections = std::make_unique<Connections>(side.process->address(), connections);
  side.call = EchoCallOf(work, work->answer_bytes());
  return side;
}

// Starts python_server.py with a file of the messages, so that it needs no generated code.
Result<std::unique_ptr<ServerProcess>> StartPython(const Bench& bench, const TempFolder& folder) {
  if (bench.options().python_server.empty()) {
    return Unimplemented("python_server.py was not found; name it with --python-server");
  }
  google::protobuf::FileDescriptorSet files;
  v1::AttendRequest::descriptor()->file()->CopyTo(files.add_file());
  const std::string path = folder.Path("attention.descriptors");
  std::ofstream(path, std::ios::binary) << files.SerializeAsString();
  return ServerProcess::Start({bench.options().python, bench.options().python_server, "--device",
                               bench.first_device(), "--descriptors", path});
}

Contestant UnaryContestant(const char* name, Side& side) {
  return {name, [&side](double seconds) {
            return Drive(*side.connections, {Script{side.call}}, side.connections->count(),
                         seconds);
          }};
}

}  // namespace

void RunSmall(Bench& bench) {
  const int clients = bench.options().clients;
  const std::shared_ptr<Work> work = bench.SmallWork();
  const std::string text = work->name() + ", " + std::to_string(clients) + " clients";
  const Question echo_question{"small", text, "bare echo", "calls/s", Measure::kRatio, kEchoTarget};
  const Question python_question{
      "small", text, "Python gRPC with PyTorch SDPA", "calls/s", Measure::kRatio, kPythonTarget};
  const bool with_echo = bench.Wants(echo_question);
  const bool with_python = bench.Wants(python_question);
  if (!with_echo && !with_python) return;
  Result<Side> attend = ConnectComputing(bench.StartAttend(Serves::kComputing), work, clients);
  if (!attend.ok()) {
    return bench.AddWithout({echo_question, python_question}, attend.status());
  }
  Result<Side> echo = ConnectEcho(work, clients);
  if (!echo.ok()) return bench.AddWithout({echo_question, python_question}, echo.status());
  // With a separate pattern, as PyTorch rounds differently.
  const TempFolder folder;
  const std::shared_ptr<Work> python_work = bench.SmallWork();
  Result<std::unique_ptr<ServerProcess>> python_process =
      with_python ? StartPython(bench, folder) : Unimplemented("not requested");
  const Status cannot = python_process.ok() ? Status() : python_process.status();
  Result<Side> python = ConnectComputing(std::move(python_process), python_work, clients);

  std::vector<Contestant> contestants = {UnaryContestant("attend", *attend)};
  if (with_echo) contestants.push_back(UnaryContestant("echo", *echo));
  if (python.ok()) contestants.push_back(UnaryContestant("Python", *python));
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) {
    return bench.AddWithout({echo_question, python_question}, samples.status());
  }
  if (with_echo) bench.AddJudged(echo_question, (*samples)[0], (*samples)[1], Calls);
  if (!with_python) return;
  if (python.ok()) {
    bench.AddJudged(python_question, (*samples)[0], samples->back(), Calls);
  } else if (cannot.code() == Code::kUnimplemented) {
    bench.Add(Skipped(python_question, cannot.message()));
  } else {
    bench.AddWithout({python_question}, python.status());
  }
}

void RunStream(Bench& bench) {
  const int clients = bench.options().clients;
  const std::shared_ptr<Work> work = bench.SmallWork();
  const Question question{"stream",
                          work->name() + ", " + std::to_string(clients) + " clients, each " +
                              std::to_string(kStreamInFlight) + " in flight on a stream",
                          "our own unary calls, one in flight a client",
                          "calls/s",
                          Measure::kRatio,
                          kStreamTarget};
  if (!bench.Wants(question)) return;
  Result<Side> attend = ConnectComputing(bench.StartAttend(Serves::kComputing), work, clients);
  if (!attend.ok()) return bench.AddWithout({question}, attend.status());
  const std::vector<StreamScripts> scripts = {StreamScriptsOf(work, kStreamInFlight)};
  const std::vector<Contestant> contestants = {{"AttendStream",
                                                [&](double seconds) {
                                                  return DriveStreams(*attend->connections, scripts,
                                                                      clients, seconds);
                                                }},
                                               UnaryContestant("unary", *attend)};
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout({question}, samples.status());
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Calls);
}

void RunLatency(Bench& bench) {
  const std::shared_ptr<Work> work = bench.SmallWork();
  const auto question = [&](const char* which, const Target& target) {
    return Question{
        "latency",
        work->name() + ", 1 caller, Unix socket, less attend's own copies and kernel, " + which,
        "bare echo",
        "us",
        Measure::kDifference,
        target};
  };
  const Question p50 = question("p50", kAddedP50Target);
  const Question p99 = question("p99", kAddedP99Target);
  if (!bench.WantsAny({p50, p99})) return;
  const TempFolder folder;
  const Result<Side> attend = ConnectComputing(
      bench.StartAttend(Serves::kComputing, {"--listen", "unix:" + folder.Path("attend.sock")}),
      work, 1);
  if (!attend.ok()) return bench.AddWithout({p50, p99}, attend.status());
  const Result<Side> echo = ConnectEcho(work, 1, "unix:" + folder.Path("echo.sock"));
  if (!echo.ok()) return bench.AddWithout({p50, p99}, echo.status());
  const std::vector<Contestant> contestants = {
      {"attend",
       [&](double seconds) {
         return DriveLatency(*attend->connections, *attend->call, /*less_own_work=*/true, seconds);
       }},
      {"echo", [&](double seconds) {
         return DriveLatency(*echo->connections, *echo->call, /*less_own_work=*/false, seconds);
       }}};
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return bench.AddWithout({p50, p99}, samples.status());
  bench.AddJudged(p50, (*samples)[0], (*samples)[1], [](const Sample& s) { return s.p50_us; });
  bench.AddJudged(p99, (*samples)[0], (*samples)[1], [](const Sample& s) { return s.p99_us; });
}

}  // namespace attend::bench
