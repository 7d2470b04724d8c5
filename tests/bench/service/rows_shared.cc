// SPDX-License-Identifier: Apache-2.0
//
// The rows about shared memory, of the host and of a GPU.

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/memory/cuda_memory.h"
#include "client/memory/shared_memory.h"
#include "tests/bench/service/chunked_driver.h"
#include "tests/bench/service/device_loop.h"
#include "tests/bench/service/pinned_copies.h"
#include "tests/bench/service/rows.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Target kCopyTarget{Target::Sense::kAtLeast, 0.8};
constexpr Target kLoopTarget{Target::Sense::kAtLeast, 0.95};
// Concurrent calls with separate memory, so that one is copied while another is computed.
constexpr int kBackToBack = 3;
constexpr int kChunkedConnections = 8;

double Gigabytes(const Sample& sample) { return sample.gigabytes_per_second(); }
double Calls(const Sample& sample) { return sample.calls_per_second(); }

// The memory of a call's tensors.
enum class Memory { kHost, kDevice };

// A server with shared memory, and the calls whose tensors are in it.
struct Shared {
  std::unique_ptr<ServerProcess> process;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::SharedMemory> memory;
  std::vector<client::AttentionCall> calls;
};

// The UUID of the server's first device, for CudaMemory.
Result<std::vector<std::string>> DeviceUuids(const Bench& bench, client::Client& client) {
  const auto info = client.GetServerInfo(std::chrono::seconds(30));
  if (!info.ok()) return info.status();
  std::vector<std::string> uuids;
  for (const v1::DeviceInfo& device : info->devices()) {
    if (device.name() == bench.first_device()) uuids.push_back(device.uuid());
  }
  return uuids;
}

Result<Shared> StartShared(const Bench& bench, const TempFolder& folder, const Work& work,
                           Memory kind) {
  Shared shared;
  const std::string socket = folder.Path("shared.sock");
  std::vector<std::string> flags = {"--shared-memory", "--shared-memory-socket", socket,
                                    "--shared-memory-client-max", "4GiB"};
  if (kind == Memory::kDevice) flags.push_back("--cuda-ipc");
  Result<std::unique_ptr<ServerProcess>> process =
      bench.StartAttend(Serves::kComputing, std::move(flags));
  if (!process.ok()) return process.status();
  shared.process = std::move(*process);
  Result<std::unique_ptr<client::Client>> client =
      ConnectChunked(shared.process->address(), kChunkedConnections);
  if (!client.ok()) return client.status();
  shared.client = std::move(*client);
  Result<std::shared_ptr<client::SharedMemory>> memory = client::SharedMemory::Connect({socket});
  if (!memory.ok()) return memory.status();
  shared.memory = std::move(*memory);
  client::MakeRegion make_region = [&](int64_t bytes) { return shared.memory->Create(bytes); };
  if (kind == Memory::kDevice) {
    const Result<std::vector<std::string>> uuids = DeviceUuids(bench, *shared.client);
    if (!uuids.ok()) return uuids.status();
    make_region = [&shared, uuids = *uuids](int64_t bytes) {
      Result<std::shared_ptr<client::DeviceMemory>> memory = client::LendableMemory(uuids, bytes);
      if (!memory.ok()) return Result<std::shared_ptr<client::SharedRegion>>(memory.status());
      return shared.memory->Lend(std::move(*memory));
    };
  }
  for (int i = 0; i < kBackToBack; ++i) {
    Result<client::AttentionCall> call = client::ShareCall(make_region, work.call());
    if (!call.ok()) return call.status();
    shared.calls.push_back(std::move(*call));
  }
  return shared;
}

// Makes each call once, and checks its answer in full in shared memory.
Status CheckShared(Shared& shared, const Work& work) {
  for (const client::AttentionCall& call : shared.calls) {
    const Result<client::AttentionResult> answer = shared.client->Call(call);
    if (!answer.ok()) return answer.status();
    const std::string wrong = work.CheckOutput(answer->o.data.get());
    if (!wrong.empty()) return Internal(wrong);
  }
  return Status();
}

Result<Sample> DriveShared(Shared& shared, const Work& work, double seconds) {
  client::CallOptions options;
  options.payload = client::Payload::kDiscard;  // it stays in shared memory
  std::atomic<int64_t> answered = 0;
  std::vector<Status> statuses(shared.calls.size());
  std::vector<std::thread> threads;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (size_t i = 0; i < shared.calls.size(); ++i) {
    threads.emplace_back([&, i] {
      do {
        const Result<client::AttentionResult> answer =
            shared.client->Call(shared.calls[i], options);
        if (!answer.ok()) {
          statuses[i] = answer.status();
          return;
        }
        ++answered;
      } while (Clock::now() < end);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Sample sample;
  sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  sample.calls = answered;
  sample.bytes = sample.calls * (work.input_bytes() + work.output_bytes());
  return sample;
}

}  // namespace

void RunSharedMemory(Bench& bench) {
  const int64_t length = !bench.gpu() ? 128 : bench.options().quick ? 4096 : 16384;
  const Work work("16 heads x " + std::to_string(length) + " x 128 fp16",
                  test::MakeSpec(1, 16, 16, length, length, 128, 128, DType::kFloat16),
                  Truth::kAttention, bench.options().seed);
  Question question{"shared_memory",
                    work.name() + ", inputs and answer in shared memory, " +
                        std::to_string(kBackToBack) + " in flight",
                    "page-locked copies over PCIe, both ways at once",
                    "GB/s",
                    Measure::kRatio,
                    kCopyTarget};
  // On a CPU nothing is copied. Compares with attend's chunked calls, for information.
  if (!bench.gpu()) {
    if (bench.Wants(question)) bench.Add(Skipped(question, "needs a GPU"));
    question.against = "our own chunked calls, one at a time";
    question.target.reset();
  }
  if (!bench.Wants(question)) return;
  const TempFolder folder;
  Result<Shared> shared = StartShared(bench, folder, work, Memory::kHost);
  if (!shared.ok()) return bench.AddWithout({question}, shared.status());
  std::vector<Contestant> contestants = {
      {"shared memory", [&](double seconds) { return DriveShared(*shared, work, seconds); }}};
  Result<std::unique_ptr<PinnedCopies>> bus = Unimplemented("this needs a GPU");
  if (bench.gpu()) {
    bus = PinnedCopies::Make(bench.first_device(), work.input_bytes(), work.output_bytes());
    if (!bus.ok()) return bench.AddWithout({question}, bus.status());
    contestants.push_back({"copies", [&](double seconds) { return (*bus)->Drive(seconds); }});
  } else {
    contestants.push_back(
        {"chunks", [&](double seconds) { return DriveChunked(*shared->client, work, seconds); }});
  }
  // Checked before and after the measurement, in which each answer overwrites the previous one.
  Status right = CheckShared(*shared, work);
  if (!right.ok()) return bench.AddWithout({question}, right);
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  right = samples.ok() ? CheckShared(*shared, work) : samples.status();
  if (!right.ok()) return bench.AddWithout({question}, right);
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Gigabytes);
}

void RunCudaIpc(Bench& bench) {
  const int64_t length = bench.options().quick ? 4096 : 8192;
  const test::ProblemSpec spec =
      test::MakeSpec(1, 16, 16, length, length, 128, 128, DType::kFloat16);
  const Work work("16 heads x " + std::to_string(length) + " x 128 fp16", spec, Truth::kAttention,
                  bench.options().seed);
  const Question question{"cuda_ipc",
                          work.name() + ", inputs and answer in GPU memory of the client, " +
                              std::to_string(kBackToBack) + " in flight",
                          "the same kernel in a plain loop in one process",
                          "calls/s",
                          Measure::kRatio,
                          kLoopTarget};
  if (!bench.Wants(question)) return;
  if (!bench.gpu()) return bench.Add(Skipped(question, "needs a GPU"));
  const TempFolder folder;
  Result<Shared> shared = StartShared(bench, folder, work, Memory::kDevice);
  if (!shared.ok()) return bench.AddWithout({question}, shared.status());
  Result<std::unique_ptr<DeviceLoop>> loop =
      DeviceLoop::Make(bench.first_device(), spec, bench.options().seed);
  if (!loop.ok()) return bench.AddWithout({question}, loop.status());
  const std::vector<Contestant> contestants = {
      {"CUDA IPC", [&](double seconds) { return DriveShared(*shared, work, seconds); }},
      {"loop", [&](double seconds) { return (*loop)->Drive(seconds); }}};
  Status right = CheckShared(*shared, work);
  if (!right.ok()) return bench.AddWithout({question}, right);
  const Result<std::vector<Samples>> samples =
      RunRounds(contestants, bench.options().rounds, bench.options().seconds);
  right = samples.ok() ? CheckShared(*shared, work) : samples.status();
  if (!right.ok()) return bench.AddWithout({question}, right);
  bench.AddJudged(question, (*samples)[0], (*samples)[1], Calls);
}

}  // namespace attend::bench
