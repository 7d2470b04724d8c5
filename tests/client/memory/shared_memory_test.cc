// SPDX-License-Identifier: Apache-2.0
//
// The client library's shared memory against a whole server: calls, streams, retries with regions
// that have gone, and a server that refuses or disappears.

#include "client/memory/shared_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>

#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/load/load_runner.h"
#include "client/tool/call_spec.h"
#include "client/tool/verify.h"
#include "client/wire/message_codec.h"
#include "server/regions/region_registry.h"
#include "server/regions/shared_memory_server.h"
#include "tests/client/support/test_seed.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

namespace fs = std::filesystem;

class SharedMemoryTest : public ::testing::Test {
 protected:
  SharedMemoryTest() {
    std::string pattern = fs::temp_directory_path() / "attend-client-shm-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = std::make_unique<test::TestServer>([this](Config& config) {
      config.shared_memory = true;
      config.shared_memory_socket = folder_ / "shm.sock";
      config.shared_memory_client_max_bytes = 16 << 20;
    });
    ClientOptions options;
    options.server = server_->address();
    options.connections = 2;
    client_ = std::move(*Client::Make(options));
  }
  ~SharedMemoryTest() override {
    client_.reset();
    server_.reset();
    fs::remove_all(folder_);
  }

  std::shared_ptr<SharedMemory> Connect() {
    const auto info = client_->GetServerInfo(std::chrono::seconds(30));
    EXPECT_TRUE(info.ok());
    Result<std::shared_ptr<SharedMemory>> memory =
        SharedMemory::Connect({info->shared_memory().socket()});
    EXPECT_TRUE(memory.ok()) << memory.status().ToString();
    return *memory;
  }
  RegionRegistry::Stats stats() const {
    return server_->server().shared_memory()->registry().stats();
  }
  void WaitUntilEmpty() {
    for (;;) {
      const RegionRegistry::Stats now = stats();
      if (now.bytes + now.changing_bytes + now.regions + now.clients == 0) return;
      std::this_thread::yield();
    }
  }
  static AttentionCall MakeCall(const std::string& spec, uint64_t seed) {
    return *MakeRandomCall(*ParseCallSpec(spec), seed);
  }

  fs::path folder_;
  std::unique_ptr<test::TestServer> server_;
  std::unique_ptr<Client> client_;
};

constexpr const char* kSpecs[] = {
    "B1,H2,L33,D64",
    "B2,H4,Hkv2,L17,D40,causal,lse",
    "B3,H2,L20,D32,ragged,layout=lhd,lse,dtype=float16",
    "B1,H2,L24,D16,bias,alibi,sinks,lse,dtype=bfloat16",
    "B1,H1,Lq0,Lk8,D8,lse",
    "B1,H1,Lq8,Lk0,D8,lse",
};

TEST_F(SharedMemoryTest, CallsAndStreamsAreRight) {
  const uint64_t seed = FreshSeed();
  auto memory = Connect();
  const std::unique_ptr<Stream> stream = client_->OpenStream();
  for (const char* spec : kSpecs) {
    SCOPED_TRACE(spec);
    const Result<AttentionCall> call = ShareCall(*memory, MakeCall(spec, seed));
    ASSERT_TRUE(call.ok()) << call.status().ToString();
    const Result<AttentionResult> result = client_->Call(*call);
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    EXPECT_EQ(result->transport, "shm");
    EXPECT_EQ(result->o.data.get(), call->outputs.o->data()) << "no copy";
    Result<RowsReport> report = VerifyAnswer(*call, *result, seed);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_TRUE(report->ok) << report->detail;

    std::promise<StreamAnswer> answered;
    stream->Send(*call, [&](StreamAnswer answer) { answered.set_value(std::move(answer)); });
    const StreamAnswer answer = answered.get_future().get();
    ASSERT_TRUE(answer.status.ok()) << answer.status.ToString();
    report = VerifyAnswer(*call, answer.result, seed);
    EXPECT_TRUE(report.ok() && report->ok);
    EXPECT_EQ(answer.result.lse.has_value(), call->return_lse);
  }
  EXPECT_TRUE(stream->Finish().ok());
  memory.reset();
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, PartsMayBeInline) {
  const auto memory = Connect();
  AttentionCall call = MakeCall("B1,H2,L64,D64,bias,lse", FreshSeed());
  const Result<std::shared_ptr<SharedRegion>> region = memory->Create(1 << 20);
  ASSERT_TRUE(region.ok());
  EXPECT_EQ((*region)->data()[12345], std::byte{0});
  std::memcpy((*region)->data() + 256, call.k.data, static_cast<size_t>(call.k.bytes));
  call.k = TensorRef(call.k.dtype, call.k.shape, SharedPlace{*region, 256}, call.k.bytes);
  call.outputs.lse = SharedPlace{*region, 512 << 10};
  const Result<AttentionResult> result = client_->Call(call);
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  EXPECT_EQ(static_cast<const void*>(result->lse->data.get()), (*region)->data() + (512 << 10));
  const Result<RowsReport> report = VerifyAnswer(call, *result, 1);
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->ok) << report->detail;
  // In either transport, it must have the requested size.
  const Result<EncodedCall> encoded = EncodedCall::Make(call);
  ASSERT_TRUE(encoded.ok());
  EXPECT_TRUE(encoded->CheckAnswer(*result).ok());
  AttentionResult other = *result;
  other.o.bytes -= 4;
  EXPECT_EQ(encoded->CheckAnswer(other).code(), Code::kInternal);
  other = *result;
  other.lse->bytes -= 4;
  EXPECT_EQ(encoded->CheckAnswer(other).code(), Code::kInternal);
}

TEST_F(SharedMemoryTest, RegionsLiveAsLongAsTheyAreHeld) {
  auto memory = Connect();
  Result<AttentionCall> call = ShareCall(*memory, MakeCall("B1,H1,L16,D16", 1));
  ASSERT_TRUE(call.ok());
  memory.reset();
  EXPECT_EQ(stats().regions, 1) << "the call holds it, and it the connection";
  Result<AttentionResult> result = client_->Call(*call);
  ASSERT_TRUE(result.ok());
  // A call in flight holds it too.
  server_->backend().Hold();
  std::promise<CallOutcome> ended;
  client_->CallAsync(*call, {}, [&](CallOutcome outcome) { ended.set_value(std::move(outcome)); });
  server_->backend().WaitForWaiting(1);
  call = InvalidArgument("gone");
  result = InvalidArgument("gone");
  EXPECT_EQ(stats().regions, 1);
  server_->backend().Release();
  EXPECT_TRUE(ended.get_future().get().status.ok());
  WaitUntilEmpty();
}

TEST_F(SharedMemoryTest, ReleaseReportsItsResult) {
  const auto memory = Connect(), other = Connect();
  const Result<AttentionCall> call = ShareCall(*memory, MakeCall("B1,H1,L16,D16", 1));
  ASSERT_TRUE(call.ok());
  SharedRegion& region = *call->outputs.o->region;
  EXPECT_EQ(other->Release(region).code(), Code::kInvalidArgument);
  EXPECT_EQ(stats().regions, 1);
  const Status released = memory->Release(region);
  EXPECT_TRUE(released.ok()) << released.ToString();
  EXPECT_EQ(stats().regions, 0);
  EXPECT_EQ(client_->Call(*call).status().code(), Code::kNotFound);
  EXPECT_EQ(memory->Release(region).code(), Code::kFailedPrecondition);
  region.data()[0] = std::byte{1};  // still mapped
  const Result<std::shared_ptr<SharedRegion>> last = memory->Create(4096);
  ASSERT_TRUE(last.ok()) << "the connection goes on";
  server_.reset();
  EXPECT_EQ(memory->Release(**last).code(), Code::kUnavailable);
}

TEST_F(SharedMemoryTest, RefusalsNameTheBound) {
  const auto memory = Connect();
  Result<std::shared_ptr<SharedRegion>> region = memory->Create((16 << 20) + 1);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.status().code(), Code::kInvalidArgument);
  EXPECT_NE(region.status().message().find("shared-memory-client-max"), std::string::npos);
  EXPECT_EQ(memory->Create(0).status().code(), Code::kInvalidArgument);
  region = memory->Create(16 << 20);
  ASSERT_TRUE(region.ok());
  EXPECT_EQ(memory->Create(1).status().code(), Code::kResourceExhausted);
  region = memory->Create(1);  // the old one is released only now
  EXPECT_FALSE(region.ok());
  EXPECT_TRUE(memory->Create(16 << 20).ok());
  EXPECT_EQ(SharedMemory::Connect({folder_ / "missing"}).status().code(), Code::kUnavailable);
  EXPECT_EQ(SharedMemory::Connect({std::string(200, 'x')}).status().code(), Code::kInvalidArgument);
}

TEST_F(SharedMemoryTest, ChunkedCallsWithRegionsAreRefused) {
  const auto memory = Connect();
  const Result<AttentionCall> call = ShareCall(*memory, MakeCall("B1,H1,L16,D16", 1));
  ASSERT_TRUE(call.ok());
  CallOptions options;
  options.transport = CallTransport::kChunked;
  const Result<AttentionResult> result = client_->Call(*call, options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
}

TEST_F(SharedMemoryTest, RegionsStayUsableWhenTheServerHasGone) {
  auto memory = Connect();
  const Result<AttentionCall> call = ShareCall(*memory, MakeCall("B1,H1,L16,D16", 1));
  ASSERT_TRUE(call.ok());
  server_.reset();
  EXPECT_EQ(memory->Create(4096).status().code(), Code::kUnavailable);
  call->outputs.o->data()[0] = std::byte{1};  // still usable by the client
}

TEST_F(SharedMemoryTest, ManyThreadsCanMakeRegionsAndCalls) {
  const auto memory = Connect();
  const uint64_t seed = FreshSeed();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        const uint64_t call_seed = seed + static_cast<uint64_t>(8 * t + i);
        const Result<AttentionCall> call =
            ShareCall(*memory, MakeCall("B1,H2,L32,D32,lse", call_seed));
        if (!call.ok()) continue;
        const Result<AttentionResult> result = client_->Call(*call);
        if (!result.ok()) continue;
        const Result<RowsReport> report = VerifyAnswer(*call, *result, call_seed);
        good += report.ok() && report->ok;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 32);
}

}  // namespace
}  // namespace attend::client
