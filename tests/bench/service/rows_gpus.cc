// SPDX-License-Identifier: Apache-2.0
//
// The row about the speedup of several GPUs over one.

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/memory/shared_memory.h"
#include "kernels/contract/backend.h"
#include "tests/bench/service/answer_slots.h"
#include "tests/bench/service/engine_slots.h"
#include "tests/bench/service/rows.h"

namespace attend::bench {
namespace {

// Per GPU: one request is copied in while another is computed and a third is copied out.
constexpr int kInFlight = 3;
// For messages without tensors.
constexpr int kConnections = 4;
// A request takes milliseconds. The timeout makes a hanging GPU an error.
constexpr std::chrono::seconds kPatience{60};

struct Team {
  int gpus = 0;
  double target = 0;
};
constexpr Team kTeams[] = {{2, 1.9}, {4, 3.6}};

double Calls(const Sample& sample) { return sample.calls_per_second(); }

std::vector<std::string> Names(const std::string& list) {
  std::vector<std::string> names;
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    names.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

std::string FirstOf(const std::vector<std::string>& names, int count) {
  std::string list;
  for (int i = 0; i < count; ++i) list += (i == 0 ? "" : ",") + names[static_cast<size_t>(i)];
  return list;
}

// A line of the table, which can be measured on any number of GPUs.
struct Line {
  std::string text;
  test::ProblemSpec spec;
  std::function<Result<std::unique_ptr<AnswerSlots>>(int gpus, const Work& work)> make;
};

// A server on some GPUs with shared memory.
struct SharedServer {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::SharedMemory> memory;
};

Result<std::shared_ptr<SharedServer>> StartShared(const Bench& bench, const std::string& socket,
                                                  const std::string& devices) {
  auto shared = std::make_shared<SharedServer>();
  // Tensors are in regions, so that a large budget would be page-locked without use.
  const std::vector<std::string> flags = {"--device",
                                          devices,
                                          "--memory-budget",
                                          "64MiB",
                                          "--shared-memory",
                                          "--shared-memory-socket",
                                          socket,
                                          "--shared-memory-max",
                                          "4GiB",
                                          "--shared-memory-client-max",
                                          "4GiB"};
  Result<std::unique_ptr<ServerProcess>> process = bench.StartAttend(Serves::kComputing, flags);
  if (!process.ok()) return process.status();
  shared->process = std::move(*process);
  client::ClientOptions options;
  options.server = shared->process->address();
  options.connections = kConnections;
  Result<std::unique_ptr<client::Client>> client = client::Client::Make(options);
  if (!client.ok()) return client.status();
  shared->client = std::move(*client);
  Result<std::shared_ptr<client::SharedMemory>> memory = client::SharedMemory::Connect({socket});
  if (!memory.ok()) return memory.status();
  shared->memory = std::move(*memory);
  return shared;
}

// Servers by number of GPUs, each started when a line first needs it.
class SharedServers {
 public:
  explicit SharedServers(const Bench& bench)
      : bench_(bench), names_(Names(bench.options().device)) {}

  Result<std::unique_ptr<AnswerSlots>> Make(int gpus, const Work& work) {
    std::shared_ptr<SharedServer>& server = servers_[gpus];
    if (server == nullptr) {
      Result<std::shared_ptr<SharedServer>> started =
          StartShared(bench_, folder_.Path(std::to_string(gpus) + ".sock"), FirstOf(names_, gpus));
      if (!started.ok()) return started.status();
      server = std::move(*started);
    }
    std::vector<Slot> slots;
    for (int i = 0; i < kInFlight * gpus; ++i) {
      Result<client::AttentionCall> call = client::ShareCall(*server->memory, work.call());
      if (!call.ok()) return call.status();
      auto* const o = reinterpret_cast<char*>(call->outputs.o->data());
      slots.push_back({o, [server, call = std::move(*call)]() -> Result<std::string> {
                         client::CallOptions options;
                         options.payload = client::Payload::kDiscard;  // it stays in shared memory
                         options.timeout = kPatience;
                         const Result<client::AttentionResult> answer =
                             server->client->Call(call, options);
                         if (!answer.ok()) return answer.status();
                         return answer->device;
                       }});
    }
    return std::make_unique<AnswerSlots>(work, std::move(slots), gpus);
  }

 private:
  const Bench& bench_;
  const std::vector<std::string> names_;
  const TempFolder folder_;
  std::map<int, std::shared_ptr<SharedServer>> servers_;
};

Question Ask(const Line& line, const Team& team) {
  return {"gpus",          line.text + ", " + std::to_string(team.gpus) + " GPUs",
          "one GPU",       "calls/s",
          Measure::kRatio, Target{Target::Sense::kAtLeast, team.target}};
}

struct Contender {
  Question question;
  std::unique_ptr<AnswerSlots> slots;
};

Result<std::vector<Samples>> Race(const Bench& bench, std::vector<Contender>& contenders) {
  std::vector<Contestant> contestants;
  for (Contender& each : contenders) {
    ATTEND_RETURN_IF_ERROR(each.slots->Check());
    contestants.push_back({each.question.work, [slots = each.slots.get()](double seconds) {
                             return slots->Drive(seconds);
                           }});
  }
  Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  if (!samples.ok()) return samples;
  // Checks whole answers once more, as only pieces were checked while they were timed.
  for (Contender& each : contenders) ATTEND_RETURN_IF_ERROR(each.slots->Check());
  return samples;
}

// Measures all numbers of GPUs and a single one in the same rounds.
void RunLine(Bench& bench, const Line& line, int gpus) {
  std::vector<Question> questions;
  std::vector<int> sizes = {1};
  for (const Team& team : kTeams) {
    const Question question = Ask(line, team);
    if (!bench.Wants(question)) continue;
    if (team.gpus > gpus) {
      const std::string needs = std::to_string(team.gpus) + " GPUs that --device names";
      bench.Add(Skipped(question, "needs " + needs + ", has " + std::to_string(gpus)));
      continue;
    }
    questions.push_back(question);
    sizes.push_back(team.gpus);
  }
  if (questions.empty()) return;
  const Work work(line.text, line.spec, Truth::kAttention, bench.options().seed);
  std::vector<Contender> contenders;
  for (size_t i = 0; i < sizes.size(); ++i) {
    Result<std::unique_ptr<AnswerSlots>> slots = line.make(sizes[i], work);
    if (!slots.ok()) return bench.AddWithout(questions, slots.status());
    contenders.push_back({i == 0 ? Question{} : questions[i - 1], std::move(*slots)});
  }
  contenders.front().question.work = "one GPU";
  const Result<std::vector<Samples>> samples = Race(bench, contenders);
  if (!samples.ok()) return bench.AddWithout(questions, samples.status());
  for (size_t i = 1; i < contenders.size(); ++i) {
    bench.AddJudged(contenders[i].question, (*samples)[i], (*samples)[0], Calls);
  }
}

}  // namespace

void RunGpus(Bench& bench) {
  const std::vector<std::string> names = Names(bench.options().device);
  const DType dtype = DType::kFloat16;
  SharedServers servers(bench);
  const auto shared = [&servers](int gpus, const Work& work) { return servers.Make(gpus, work); };
  const auto in_process = [&names](int gpus, const Work& work) {
    return MakeEngineSlots(FirstOf(names, gpus), gpus, work, kInFlight * gpus);
  };
  const std::string in_flight = ", " + std::to_string(kInFlight) + " in flight a GPU";
  const auto bus_bound = test::MakeSpec(1, 16, 16, 8192, 8192, 128, 128, dtype);
  const auto kernel_bound = test::MakeSpec(1, 8, 1, 16384, 16384, 128, 128, dtype);
  const std::string kernel_text = "B1 Hq8 Hkv1 L16384 D128 fp16, bound by the kernel";
  const Line lines[] = {
      {"shared memory, B1 H16 L8192 D128 fp16, bound by the bus" + in_flight, bus_bound, shared},
      {"shared memory, " + kernel_text + in_flight, kernel_bound, shared},
      {"in process, " + kernel_text + in_flight, kernel_bound, in_process},
  };
  // Neither "cpu" nor missing GPUs are failures.
  const int named = bench.gpu() ? static_cast<int>(names.size()) : 0;
  const int gpus = std::min(named, CudaDeviceCount());
  for (const Line& line : lines) RunLine(bench, line, gpus);
}

}  // namespace attend::bench
