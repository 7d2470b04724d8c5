// SPDX-License-Identifier: Apache-2.0
//
// Calls of the client library over device memory that it lends, against a whole server whose device
// is the test's own memory; and the error without a GPU.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "attend/v1/shared_memory.pb.h"
#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/load/load_runner.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/call_spec.h"
#include "client/tool/verify.h"
#include "server/regions/region_registry.h"
#include "server/regions/shared_memory_server.h"
#include "tests/client/support/test_seed.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

namespace fs = std::filesystem;

// Memory of the fake device. Its addresses are the host's, so a copy without Read would succeed;
// Read and Write count the bytes they transfer.
class FakeDeviceMemory final : public DeviceMemory {
 public:
  // `freed` is called at the end.
  FakeDeviceMemory(test::FakeBackend& backend, std::string handle, int64_t bytes,
                   std::function<void()> freed)
      : handle_(std::move(handle)),
        bytes_(bytes),
        block_(test::MakeBlock(bytes)),
        freed_(std::move(freed)) {
    std::memset(block_.get(), 0xff, static_cast<size_t>(bytes));
    backend.Lend(handle_, {reinterpret_cast<char*>(block_.get()), bytes});
  }
  ~FakeDeviceMemory() override {
    if (freed_) freed_();
  }
  std::byte* data() const override { return block_.get(); }
  int64_t bytes() const override { return bytes_; }
  Status Write(int64_t offset, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(block_.get() + offset, from, static_cast<size_t>(bytes));
    written_ += bytes;
    return Status();
  }
  Status Read(int64_t offset, void* to, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, block_.get() + offset, static_cast<size_t>(bytes));
    read_ += bytes;
    return refusal_;
  }
  Status Describe(v1::ImportCudaMemory* lent) const override {
    lent->set_device_uuid(test::TestServer::DeviceUuid(0));
    lent->set_memory_handle(handle_);
    lent->set_bytes(static_cast<uint64_t>(bytes_));
    return Status();
  }

  int64_t written() const { return written_; }
  int64_t read() const { return read_; }
  void RefuseReads(Status status) { refusal_ = std::move(status); }

 private:
  const std::string handle_;
  const int64_t bytes_;
  const test::Block block_;
  const std::function<void()> freed_;
  std::atomic<int64_t> written_ = 0;
  std::atomic<int64_t> read_ = 0;
  Status refusal_;
};

class LentMemoryTest : public ::testing::Test {
 protected:
  LentMemoryTest() {
    std::string pattern = fs::temp_directory_path() / "attend-client-ipc-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = std::make_unique<test::TestServer>([this](Config& config) {
      config.shared_memory = config.cuda_ipc = true;
      config.shared_memory_socket = folder_ / "shm.sock";
    });
    ClientOptions options;
    options.server = server_->address();
    client_ = std::move(*Client::Make(options));
    memory_ = *SharedMemory::Connect({folder_ / "shm.sock"});
  }
  ~LentMemoryTest() override {
    memory_.reset();
    client_.reset();
    server_.reset();
    fs::remove_all(folder_);
  }

  std::shared_ptr<FakeDeviceMemory> Allocate(int64_t bytes, std::function<void()> freed = {}) {
    return std::make_shared<FakeDeviceMemory>(
        server_->backend(), "handle-" + std::to_string(++allocated_), bytes, std::move(freed));
  }
  // The call in device memory, which is kept in device_.
  Result<AttentionCall> Lend(const AttentionCall& call) {
    return ShareCall(
        [this](int64_t bytes) {
          device_ = Allocate(bytes);
          return memory_->Lend(device_);
        },
        call);
  }
  void WaitUntilReleased() {
    while (server_->backend().imported() > 0) std::this_thread::yield();
  }

  fs::path folder_;
  std::unique_ptr<test::TestServer> server_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<FakeDeviceMemory> device_;
  std::atomic<int> allocated_ = 0;
};

TEST_F(LentMemoryTest, CallsAndStreamsAreRight) {
  const uint64_t seed = FreshSeed();
  const std::unique_ptr<Stream> stream = client_->OpenStream();
  for (const char* spec :
       {"B1,H2,L33,D64", "B2,H4,Hkv2,L17,D40,causal,lse",
        "B3,H2,L20,D32,ragged,layout=lhd,lse,dtype=float16",
        "B1,H2,L24,D16,bias,alibi,sinks,lse,dtype=bfloat16", "B1,H1,Lq0,Lk8,D8,lse"}) {
    SCOPED_TRACE(spec);
    const Result<AttentionCall> call = Lend(*MakeRandomCall(*ParseCallSpec(spec), seed));
    ASSERT_TRUE(call.ok()) << call.status().ToString();
    EXPECT_EQ(device_->written(), PayloadBytes(*call));
    const Result<AttentionResult> result = client_->Call(*call);
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    EXPECT_EQ(result->transport, "cuda-ipc");
    if (result->o.bytes > 0) {
      EXPECT_NE(result->o.data.get(), call->outputs.o->data()) << "the host gets a copy";
    }
    EXPECT_EQ(device_->read(), result->o.bytes + (result->lse ? result->lse->bytes : 0));
    Result<RowsReport> report = VerifyAnswer(*call, *result, seed);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_TRUE(report->ok) << report->detail;

    std::promise<StreamAnswer> answered;
    stream->Send(*call, [&](StreamAnswer answer) { answered.set_value(std::move(answer)); });
    const StreamAnswer answer = answered.get_future().get();
    ASSERT_TRUE(answer.status.ok()) << answer.status.ToString();
    report = VerifyAnswer(*call, answer.result, seed);
    EXPECT_TRUE(report.ok() && report->ok);
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(LentMemoryTest, DiscardedAnswersAreNotCopied) {
  const Result<AttentionCall> call = Lend(*MakeRandomCall(*ParseCallSpec("B1,H2,L33,D64"), 1));
  ASSERT_TRUE(call.ok()) << call.status().ToString();
  CallOptions options;
  options.payload = Payload::kDiscard;
  ASSERT_TRUE(client_->Call(*call, options).ok());
  EXPECT_EQ(device_->read(), 0);
  device_->RefuseReads(Internal("the device fell off"));
  const Result<AttentionResult> failed = client_->Call(*call);
  EXPECT_EQ(failed.status().message(), "the device fell off");
}

// Memory that the server has closed may be freed: Release waits for that.
TEST_F(LentMemoryTest, ReleasedMemoryIsNoLongerInUse) {
  for (int i = 0; i < 50; ++i) {
    const Result<std::shared_ptr<SharedRegion>> region = memory_->Lend(Allocate(4096));
    ASSERT_TRUE(region.ok()) << region.status().ToString();
    EXPECT_EQ(server_->backend().imported(), 1);
    const Status closed = memory_->Release(**region);
    ASSERT_TRUE(closed.ok()) << closed.ToString();
    EXPECT_EQ(server_->backend().imported(), 0);
    EXPECT_EQ(memory_->Release(**region).code(), Code::kFailedPrecondition);
  }
}

// A region may be dropped at any time: its memory is kept as long as the server has it open.
TEST_F(LentMemoryTest, DroppedMemoryIsFreedOnceTheServerHasClosedIt) {
  int freed = 0, early = 0;
  const auto drop = [&] {
    const auto region = memory_->Lend(Allocate(4096, [&] {
      ++freed;
      early += server_->backend().imported() > 0;
    }));
    ASSERT_TRUE(region.ok()) << region.status().ToString();
  };
  for (int i = 1; i <= 50; ++i) {
    drop();
    ASSERT_TRUE(memory_->Create(4096).ok());  // its answer comes after that of the release
    EXPECT_EQ(freed, i);
  }
  drop();
  memory_.reset();  // waits
  EXPECT_EQ(freed, 51);
  EXPECT_EQ(early, 0) << "freed while the server had it open";
}

TEST_F(LentMemoryTest, ReleaseWaitsForRunningCalls) {
  server_->backend().Hold();
  const auto region = memory_->Lend(Allocate(65536));
  ASSERT_TRUE(region.ok()) << region.status().ToString();
  const Result<AttentionCall> call = ShareCall([&](int64_t) { return region; },
                                               *MakeRandomCall(*ParseCallSpec("B1,H1,L16,D16"), 1));
  ASSERT_TRUE(call.ok()) << call.status().ToString();
  auto called = std::async(std::launch::async, [&] { return client_->Call(*call); });
  server_->backend().WaitForWaiting(1);
  auto released = std::async(std::launch::async, [&] { return memory_->Release(**region); });
  const RegionRegistry& registry = server_->server().shared_memory()->registry();
  while (registry.Find((*region)->token(), 0) != nullptr) std::this_thread::yield();
  EXPECT_EQ(server_->backend().imported(), 1);
  EXPECT_NE(released.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  server_->backend().Release();
  const Status closed = released.get();
  EXPECT_TRUE(closed.ok()) << closed.ToString();
  EXPECT_EQ(server_->backend().imported(), 0);
  EXPECT_TRUE(called.get().ok());
}

TEST_F(LentMemoryTest, TheServersRefusalIsReported) {
  server_->backend().RefuseImports(InvalidArgument("it was freed"));
  const auto region = memory_->Lend(Allocate(4096));
  EXPECT_EQ(region.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(region.status().message(), "it was freed");
  EXPECT_TRUE(memory_->Create(4096).ok()) << "the connection goes on";
}

TEST_F(LentMemoryTest, LoadRunsInLentMemory) {
  LoadOptions options;
  options.client.server = server_->address();
  options.mix = {*ParseCallSpec("B1,H2,L33,D64,lse"), *ParseCallSpec("B2,H1,L20,D32,causal")};
  options.count = 40;
  options.warmup_s = 0;
  options.verify_share = 0.5;
  options.quiet = true;
  options.shared_memory_socket.path = folder_ / "shm.sock";
  options.device_memory = [this](int64_t bytes) -> Result<std::shared_ptr<DeviceMemory>> {
    return std::shared_ptr<DeviceMemory>(Allocate(bytes));
  };
  const std::atomic<bool> interrupted = false;
  {
    const Result<Workload> workload = Workload::Make(options);
    ASSERT_TRUE(workload.ok()) << workload.status().ToString();
    VerifyQueue verify(options.verify_bytes_max);
    LoadRunner runner(options, *workload, &verify, &interrupted);
    const Result<LoadResult> result = runner.Run({.concurrency = 4, .rate_per_s = 0});
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    EXPECT_EQ(result->stats.window_ok, 40);
    EXPECT_GT(result->verified.passed, 0);
    EXPECT_EQ(result->verified.failed, 0);
  }
  WaitUntilReleased();
}

TEST(CudaMemory, WithoutAGpuTheErrorHasTheReason) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  const Result<std::shared_ptr<CudaMemory>> memory =
      CudaMemory::Allocate({std::string(16, 'x')}, 4096);
  ASSERT_FALSE(memory.ok()) << "no GPU has this UUID";
  if (driver.ok()) {
    EXPECT_EQ(memory.status().code(), Code::kNotFound);
  } else {
    EXPECT_EQ(driver.status().code(), Code::kFailedPrecondition);
    EXPECT_EQ(memory.status().message(), driver.status().message());
    EXPECT_NE(memory.status().message().find("no GPU memory to lend: "), std::string::npos);
  }
}

}  // namespace
}  // namespace attend::client
