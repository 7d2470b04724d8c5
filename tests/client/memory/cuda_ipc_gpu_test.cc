// SPDX-License-Identifier: Apache-2.0
//
// CUDA IPC between two processes on a real GPU: attend-server on cuda:0, and this process, which
// lends it memory. Skipped (77) without a GPU.
//
// With `--victim ADDRESS SOCKET` this program is a client that lends memory and makes calls until
// it is killed.

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/call_spec.h"
#include "kernels/contract/backend.h"
#include "tests/client/support/test_seed.h"
#include "tests/server/support/test_server.h"

extern char** environ;

namespace attend::client {
namespace {

namespace fs = std::filesystem;

fs::path Self() { return fs::read_symlink("/proc/self/exe"); }

// Beside this program, in a folder of binaries, or where it was built.
std::string ServerBinary() {
  const fs::path beside = Self().parent_path() / "attend-server";
  return fs::exists(beside) ? beside.string() : ATTEND_SERVER_BINARY;
}

// A child process; killed at the end.
class Process {
 public:
  // With its output in `output`, unless that is -1.
  Process(const std::vector<std::string>& command, int output = -1) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (output >= 0) posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    const int error = posix_spawn(&pid_, words[0], &actions, nullptr, words.data(), environ);
    EXPECT_EQ(error, 0) << command[0];
    if (error != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  bool running() {
    if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) != 0) pid_ = -1;
    return pid_ > 0;
  }

 private:
  pid_t pid_ = -1;
};

std::unique_ptr<Client> Connect(const std::string& address) {
  ClientOptions options;
  options.server = address;
  return std::move(*Client::Make(options));
}

std::vector<std::string> Devices(Client& client) {
  const auto info = client.GetServerInfo(std::chrono::seconds(60));
  std::vector<std::string> uuids;
  if (!info.ok()) return uuids;
  for (const v1::DeviceInfo& device : info->devices()) uuids.push_back(device.uuid());
  return uuids;
}

Result<AttentionCall> LendCall(SharedMemory& memory, const std::vector<std::string>& uuids,
                               const AttentionCall& call) {
  return ShareCall(
      [&](int64_t bytes) -> Result<std::shared_ptr<SharedRegion>> {
        Result<std::shared_ptr<DeviceMemory>> device = LendableMemory(uuids, bytes);
        if (!device.ok()) return device.status();
        return memory.Lend(std::move(*device));
      },
      call);
}

AttentionCall MakeCall(const std::string& spec, uint64_t seed) {
  return *MakeRandomCall(*ParseCallSpec(spec), seed);
}

bool SameBits(const HostTensor& a, const HostTensor& b) {
  return a.bytes == b.bytes && (a.bytes == 0 || std::memcmp(a.data.get(), b.data.get(),
                                                            static_cast<size_t>(a.bytes)) == 0);
}

class CudaIpcGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "attend-gpu-ipc-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    const std::string ready = folder_ / "ready.json";
    server_ = std::make_unique<Process>(std::vector<std::string>{
        ServerBinary(), "--device", "cuda:0", "--listen", "127.0.0.1:0", "--metrics-listen",
        "127.0.0.1:0", "--shared-memory", "--shared-memory-socket", socket(), "--cuda-ipc",
        "--ready-file", ready});
    while (server_->running() && !fs::exists(ready)) std::this_thread::yield();
    ASSERT_TRUE(server_->running()) << "the server did not start";
    std::ifstream file(ready);
    const nlohmann::json json = nlohmann::json::parse(file);
    address_ = json["listen"][0];
    metrics_address_ = json["metrics"];
    client_ = Connect(address_);
    uuids_ = Devices(*client_);
    Result<std::shared_ptr<SharedMemory>> memory = SharedMemory::Connect({socket()});
    ASSERT_TRUE(memory.ok()) << memory.status().ToString();
    memory_ = std::move(*memory);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  void TearDown() override {
    memory_.reset();
    client_.reset();
    server_.reset();
    fs::remove_all(folder_);
  }

  std::string socket() const { return folder_ / "shm.sock"; }
  double Metric(const std::string& name) const {
    const std::string text = test::HttpGet(metrics_address_, "/metrics");
    const size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size() + 2);
  }
  AttentionResult MustCall(const AttentionCall& call) {
    Result<AttentionResult> result = client_->Call(call);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    return result.ok() ? std::move(*result) : AttentionResult();
  }
  // Inline and in place.
  void ExpectServes(const std::string& spec, uint64_t seed) {
    const AttentionCall call = MakeCall(spec, seed);
    const AttentionResult plain = MustCall(call);
    const Result<AttentionCall> lent = LendCall(*memory_, uuids_, call);
    ASSERT_TRUE(lent.ok()) << lent.status().ToString();
    const AttentionResult in_place = MustCall(*lent);
    EXPECT_EQ(in_place.transport, "cuda-ipc");
    EXPECT_EQ(in_place.device, "cuda:0");
    EXPECT_TRUE(SameBits(plain.o, in_place.o)) << spec << " seed " << seed;
    ASSERT_EQ(plain.lse.has_value(), in_place.lse.has_value());
    if (plain.lse) {
      EXPECT_TRUE(SameBits(*plain.lse, *in_place.lse)) << spec << " seed " << seed;
    }
  }

  fs::path folder_;
  std::unique_ptr<Process> server_;
  std::string address_, metrics_address_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::string> uuids_;
};

TEST_F(CudaIpcGpuTest, SameBitsAsInline) {
  const uint64_t seed = FreshSeed();
  for (const char* spec :
       {"B1,H8,L128,D64,dtype=float16", "B1,H2,L33,D64,lse", "B2,H4,Hkv2,L17,D40,causal,lse",
        "B3,H2,L200,D64,ragged,layout=lhd,lse,dtype=float16",
        "B1,H2,L240,D128,bias,alibi,sinks,lse,dtype=bfloat16", "B1,H1,Lq0,Lk8,D8,lse",
        "B1,H16,L8192,D128,dtype=float16,lse", "B1,H4,L8192,D128,causal,dtype=bfloat16"}) {
    SCOPED_TRACE(spec);
    ExpectServes(spec, seed);
  }
}

// The inputs are written on a stream of this process, behind much other work; without the event the
// server would find NaN.
TEST_F(CudaIpcGpuTest, WaitsForTheClientsEvent) {
  const uint64_t seed = FreshSeed();
  const AttentionCall call = MakeCall("B1,H8,L1024,D64,dtype=float16", seed);
  const AttentionResult plain = MustCall(call);
  constexpr size_t kBallast = size_t{256} << 20;
  const int64_t inputs = SharedInputBytes(call);
  const int64_t bytes = inputs + SharedOutputBytes(call);
  void *data = nullptr, *pinned = nullptr, *ballast = nullptr;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaMalloc(&data, static_cast<size_t>(bytes)), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&ballast, kBallast), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&pinned, static_cast<size_t>(inputs)), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const Result<std::shared_ptr<CudaMemory>> memory = CudaMemory::Wrap(data, bytes);
    ASSERT_TRUE(memory.ok()) << memory.status().ToString();
    ASSERT_TRUE((*memory)->Record(stream).ok());
    const Result<AttentionCall> lent =
        ShareCall([&](int64_t) { return memory_->Lend(*memory); }, call);
    ASSERT_TRUE(lent.ok()) << lent.status().ToString();
    const auto size = static_cast<size_t>(inputs);
    ASSERT_EQ(cudaMemcpy(pinned, data, size, cudaMemcpyDeviceToHost), cudaSuccess);
    for (int round = 0; round < 3; ++round) {
      ASSERT_EQ(cudaMemset(data, 0xff, size), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (int n = 0; n < 200; ++n) {
        ASSERT_EQ(cudaMemsetAsync(ballast, n, kBallast, stream), cudaSuccess);
      }
      ASSERT_EQ(cudaMemcpyAsync(data, pinned, size, cudaMemcpyHostToDevice, stream), cudaSuccess);
      const Status recorded = (*memory)->Record(stream);
      ASSERT_TRUE(recorded.ok()) << recorded.ToString();
      EXPECT_TRUE(SameBits(plain.o, MustCall(*lent).o)) << "round " << round << " seed " << seed;
    }
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(memory_->Release(*lent->outputs.o->region).ok());
  }
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_EQ(cudaFree(ballast), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Memory whose description is altered before it is sent.
class FalseMemory final : public DeviceMemory {
 public:
  FalseMemory(std::shared_ptr<DeviceMemory> memory,
              std::function<void(v1::ImportCudaMemory*)> change)
      : memory_(std::move(memory)), change_(std::move(change)) {}
  std::byte* data() const override { return memory_->data(); }
  int64_t bytes() const override { return memory_->bytes(); }
  Status Write(int64_t offset, const void* from, int64_t bytes) override {
    return memory_->Write(offset, from, bytes);
  }
  Status Read(int64_t offset, void* to, int64_t bytes) override {
    return memory_->Read(offset, to, bytes);
  }
  Status Describe(v1::ImportCudaMemory* lent) const override {
    const Status filled = memory_->Describe(lent);
    change_(lent);
    return filled;
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  const std::function<void(v1::ImportCudaMemory*)> change_;
};

TEST_F(CudaIpcGpuTest, AlteredDescriptionsOfMemoryAreRefused) {
  const Result<std::shared_ptr<DeviceMemory>> memory = LendableMemory(uuids_, 4 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  const auto lend = [&](std::function<void(v1::ImportCudaMemory*)> change) {
    return memory_->Lend(std::make_shared<FalseMemory>(*memory, std::move(change))).status();
  };
  const Status large = lend([](v1::ImportCudaMemory* lent) { lent->set_bytes(8 << 20); });
  EXPECT_EQ(large.code(), Code::kInvalidArgument) << large.ToString();
  EXPECT_NE(large.message().find("must end within the allocation's"), std::string::npos)
      << large.message();
  const Status handle =
      lend([](v1::ImportCudaMemory* lent) { lent->set_memory_handle(std::string(64, '\x5a')); });
  EXPECT_FALSE(handle.ok());
  const Status event =
      lend([](v1::ImportCudaMemory* lent) { lent->set_event_handle(std::string(64, '\x5a')); });
  EXPECT_FALSE(event.ok());
  EXPECT_EQ(Metric("attend_cuda_ipc_regions"), 0);
  ExpectServes("B1,H8,L128,D64,dtype=float16", FreshSeed());
}

TEST_F(CudaIpcGpuTest, PoolMemoryIsRefusedByTheClientWithTheReason) {
  void* pooled = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pooled, 4 << 20, nullptr), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  const Result<std::shared_ptr<CudaMemory>> memory = CudaMemory::Wrap(pooled, 4 << 20);
  EXPECT_EQ(memory.status().code(), Code::kInvalidArgument);
  EXPECT_NE(memory.status().message().find("stream-ordered pools"), std::string::npos)
      << memory.status().message();
  EXPECT_EQ(cudaFreeAsync(pooled, nullptr), cudaSuccess);
}

TEST_F(CudaIpcGpuTest, LentTwiceIsMappedOnceAndOwnHandlesAreRefused) {
  const Result<std::shared_ptr<DeviceMemory>> memory = LendableMemory(uuids_, 4 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  const AttentionCall call = MakeCall("B1,H2,L128,D64,dtype=float16", FreshSeed());
  const AttentionResult plain = MustCall(call);
  Result<std::shared_ptr<SharedRegion>> first = memory_->Lend(*memory);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  const Result<AttentionCall> lent =
      ShareCall([&](int64_t) { return memory_->Lend(*memory); }, call);
  ASSERT_TRUE(lent.ok()) << lent.status().ToString();
  EXPECT_TRUE(SameBits(plain.o, MustCall(*lent).o));
  *first = nullptr;
  EXPECT_TRUE(SameBits(plain.o, MustCall(*lent).o)) << "the other import stays";

  v1::ImportCudaMemory described;
  ASSERT_TRUE((*memory)->Describe(&described).ok());
  const Result<std::unique_ptr<Backend>> own = MakeBackend("cuda:0", BackendOptions());
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  EXPECT_FALSE((*own)->ImportMemory(described.memory_handle()).ok());
}

// CUDA decides what happens to the dying lender; other clients must not notice.
TEST_F(CudaIpcGpuTest, AClientKilledInFlightDoesNotHarmOthers) {
  for (int round = 0; round < 3; ++round) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    Process victim({Self(), "--victim", address_, socket()}, ends[1]);
    close(ends[1]);
    char c = 0;
    ASSERT_EQ(read(ends[0], &c, 1), 1) << "the victim ended by itself";
    EXPECT_EQ(c, '+');
    victim.Kill();
    close(ends[0]);
    ExpectServes("B1,H8,L1024,D64,dtype=float16", FreshSeed());
    while (Metric("attend_cuda_ipc_regions") != 0) std::this_thread::yield();
    ASSERT_TRUE(server_->running());
    ExpectServes("B1,H16,L4096,D128,dtype=float16", FreshSeed());
  }
}

int Victim(const std::string& address, const std::string& socket) {
  const std::unique_ptr<Client> client = Connect(address);
  const Result<std::shared_ptr<SharedMemory>> memory = SharedMemory::Connect({socket});
  if (!memory.ok()) return 1;
  const Result<AttentionCall> call =
      LendCall(**memory, Devices(*client), MakeCall("B1,H8,L32768,D128,dtype=float16", 1));
  if (!call.ok()) {
    std::fprintf(stderr, "the victim cannot lend: %s\n", call.status().ToString().c_str());
    return 1;
  }
  CallOptions options;
  options.payload = Payload::kDiscard;
  for (int n = 0;; ++n) {
    if (!client->Call(*call, options).ok()) return 1;
    if (n == 2 && write(STDOUT_FILENO, "+", 1) != 1)
      return 1;  // some call is in flight from now on
  }
}

}  // namespace
}  // namespace attend::client

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--victim") {
    return attend::client::Victim(argv[2], argv[3]);
  }
  testing::InitGoogleTest(&argc, argv);
  std::string why;
  if (attend::CudaDeviceCount(&why) == 0) {
    std::printf("skipped: %s\n", why.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
