// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface whose tensors are in a GPU's memory, over a driver of the test's own,
// which is the server's device too, and on a server that takes no such memory.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/c/c_calls.h"
#include "tests/client/support/fake_cuda.h"
#include "tests/server/support/test_server.h"

namespace attend::client::c::test {
namespace {

using attend::client::test::FakeCuda;
using attend::test::TestServer;

void* const kStream = reinterpret_cast<void*>(7);

Case OnDevice(int64_t rows = 256) {
  Case c(4, rows, 64);
  for (attend_client_tensor* tensor : {&c.params.q, &c.params.k, &c.params.v}) tensor->memory = 1;
  c.params.stream = kStream;
  return c;
}

std::vector<float> CopyOf(Call& call, const attend_client_tensor& tensor) {
  size_t count = 1;
  for (int n = 0; n < tensor.dims; ++n) count *= static_cast<size_t>(tensor.shape[n]);
  std::vector<float> copy(count);
  EXPECT_EQ(attend_client_copy(call.get(), &tensor, copy.data(), 0, kStream), ATTEND_CLIENT_OK)
      << attend_client_last_error();
  return copy;
}

// O and LSE, which went this way and are in this memory.
std::vector<float> MustCall(attend_client* client, const attend_client_params& params,
                            const std::string& transport, int32_t memory) {
  Call call(Start(client, params));
  const attend_client_answer answer = call.Answer();
  EXPECT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  EXPECT_EQ(answer.transport, transport);
  EXPECT_EQ(answer.o.memory, memory);
  EXPECT_EQ(answer.lse.memory, memory);
  std::vector<float> all = CopyOf(call, answer.o);
  const std::vector<float> lse = CopyOf(call, answer.lse);
  all.insert(all.end(), lse.begin(), lse.end());
  return all;
}

class DeviceCallTest : public ::testing::Test {
 protected:
  DeviceCallTest() {
    std::string pattern = fs::temp_directory_path() / "attend-device-call-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = MakeServer("shm.sock");
    FakeCuda& driver = FakeCuda::Get();
    driver.uuid = TestServer::DeviceUuid(0);
    driver.on_memory_handle = [this](const std::string& handle, char* data, size_t bytes) {
      server_->backend().Lend(handle, {reinterpret_cast<char*>(data), static_cast<int64_t>(bytes)});
    };
    driver.on_event_handle = [this](const std::string& handle) {
      server_->backend().LendEvent(handle);
    };
    driver.on_record = driver.on_event_handle;
    driver.on_reached = [this](const std::string& handle) { server_->backend().Reach(handle); };
    client_ = Connect("");
  }
  ~DeviceCallTest() override {
    attend_client_close(client_);
    server_.reset();
    FakeCuda::Get().on_memory_handle = {};
    FakeCuda::Get().on_event_handle = FakeCuda::Get().on_record = FakeCuda::Get().on_reached = {};
    FakeCuda::Get().RefuseAllocations(false);
    fs::remove_all(folder_);
  }
  std::unique_ptr<TestServer> MakeServer(const std::string& socket) {
    return std::make_unique<TestServer>([&](Config& config) {
      config.shared_memory = config.cuda_ipc = true;
      config.shared_memory_socket = folder_ / socket;
    });
  }
  attend_client* Connect(const std::string& socket) {
    attend_client_options options = {};
    options.struct_bytes = sizeof(options);
    options.server = server_->address().c_str();
    if (!socket.empty()) options.shared_memory_socket = socket.c_str();
    attend_client* client = nullptr;
    EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_OK);
    return client;
  }

  fs::path folder_;
  std::unique_ptr<TestServer> server_;
  attend_client* client_ = nullptr;
};

TEST_F(DeviceCallTest, TensorsStayOnTheDevice) {
  Case host(4, 256, 64);
  host.params.transport = ATTEND_CLIENT_INLINE;
  const std::vector<float> wanted = MustCall(client_, host.params, "inline", 0);
  const Case c = OnDevice();
  FakeCuda::Get().TakeLog();
  const int before = FakeCuda::Get().allocations();
  EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
  const std::string copy = "copy " + std::to_string(c.q.size() * sizeof(float)) + " on 7";
  const std::string lse = "copy " + std::to_string(4 * 256 * sizeof(float)) + " on 7";
  EXPECT_EQ(FakeCuda::Get().TakeLog(),
            (std::vector<std::string>{"wait on 7", copy, copy, copy, "record on 7", "wait on 7",
                                      copy, "record on 7", "wait on 7", lse, "record on 7"}));
  for (int n = 0; n < 5; ++n) EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
  // A call may start before the client's thread has let go of the last one.
  EXPECT_LE(FakeCuda::Get().allocations(), before + 2) << "the memory is not used again";
}

TEST_F(DeviceCallTest, TheServerWaitsForTheStream) {
  Case c = OnDevice();
  const std::vector<float> right = MustCall(client_, c.params, "cuda-ipc", 1);
  const std::vector<float> q = c.q;
  c.q.assign(c.q.size(), -5);
  FakeCuda::Get().Hold();
  // Work of the caller's on the same stream.
  FakeCuda::Get().Enqueue("write", kStream, [&] { std::copy(q.begin(), q.end(), c.q.begin()); });
  Call call(Start(client_, c.params));
  EXPECT_FALSE(call.Wait(100'000'000)) << "the server has not waited";
  FakeCuda::Get().LetGo();
  const attend_client_answer answer = call.Answer();
  ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  const std::vector<float> o = CopyOf(call, answer.o);
  EXPECT_EQ(std::memcmp(o.data(), right.data(), o.size() * sizeof(float)), 0);
}

TEST_F(DeviceCallTest, SomeTensorsMayBeOnTheHost) {
  const std::vector<float> wanted = MustCall(client_, OnDevice().params, "cuda-ipc", 1);
  Case c = OnDevice();
  c.params.v.memory = 0;
  EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
  c.params.q.memory = 0;  // the answer is where q is
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
}

TEST_F(DeviceCallTest, WhatCannotGoSoGoesOverTheHost) {
  Case c = OnDevice();
  const std::vector<float> wanted = MustCall(client_, c.params, "cuda-ipc", 1);
  c.params.transport = ATTEND_CLIENT_INLINE;
  EXPECT_EQ(MustCall(client_, c.params, "inline", 0), wanted);
  c.params.transport = ATTEND_CLIENT_CHUNKED;
  EXPECT_EQ(MustCall(client_, c.params, "chunked", 0), wanted);
  c.params.transport = ATTEND_CLIENT_AUTO;
  c.params.check = 1;
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
  c.params.check = 0;
  attend_client_stream* stream = nullptr;
  ASSERT_EQ(attend_client_stream_open(client_, nullptr, 0, &stream), ATTEND_CLIENT_OK);
  attend_client_call* started = nullptr;
  ASSERT_EQ(attend_client_stream_start(stream, &c.params, &started), ATTEND_CLIENT_OK);
  {
    Call call(started);
    const attend_client_answer answer = call.Answer();
    EXPECT_EQ(answer.o.memory, 0) << answer.message;
    EXPECT_EQ(std::memcmp(answer.o.data, wanted.data(), c.q.size() * sizeof(float)), 0);
  }
  attend_client_stream_close(stream);
  const Case small = OnDevice(8);
  MustCall(client_, small.params, "inline", 0);
}

TEST_F(DeviceCallTest, NoRoomOrARefusalIsNoError) {
  const Case c = OnDevice();
  FakeCuda::Get().RefuseAllocations(true);
  const std::vector<float> wanted = MustCall(client_, c.params, "shm", 0);
  FakeCuda::Get().RefuseAllocations(false);
  server_->backend().RefuseImports(Status(Code::kResourceExhausted, "no room"));
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
  server_->backend().RefuseImports(Status());
  EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
}

// The socket is that of another server, which lends and imports, but does not serve the call.
TEST_F(DeviceCallTest, MemoryThatTheServerDoesNotKnowIsReadAgain) {
  const Case c = OnDevice();
  const std::vector<float> wanted = MustCall(client_, c.params, "cuda-ipc", 1);
  const std::unique_ptr<TestServer> other = MakeServer("other.sock");
  FakeCuda::Get().on_memory_handle = [&](const std::string& handle, char* data, size_t bytes) {
    other->backend().Lend(handle, {data, static_cast<int64_t>(bytes)});
  };
  FakeCuda::Get().on_event_handle = FakeCuda::Get().on_record = [&](const std::string& handle) {
    other->backend().LendEvent(handle);
  };
  attend_client* const client = Connect(folder_ / "other.sock");
  for (int n = 0; n < 2; ++n) EXPECT_EQ(MustCall(client, c.params, "inline", 0), wanted);
  attend_client_close(client);
}

TEST_F(DeviceCallTest, GradientsTakeTheSameWay) {
  Case c = OnDevice();
  Call forward(Start(client_, c.params));
  const attend_client_answer answer = forward.Answer();
  ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  c.params.return_lse = 0;
  c.params.wanted = ATTEND_CLIENT_D_Q | ATTEND_CLIENT_D_V;
  c.params.d_o = c.params.v;
  Call alone(Start(client_, c.params));  // the forward pass goes over the host, and so does this
  c.params.o = answer.o;
  c.params.lse = answer.lse;
  Call with(Start(client_, c.params));
  const attend_client_answer one = alone.Answer(), other = with.Answer();
  ASSERT_EQ(one.code, ATTEND_CLIENT_OK) << one.message;
  ASSERT_EQ(other.code, ATTEND_CLIENT_OK) << other.message;
  EXPECT_STREQ(other.transport, "cuda-ipc");
  EXPECT_EQ(other.d_q.memory, 1);
  EXPECT_EQ(one.d_q.memory, 0);
  EXPECT_EQ(CopyOf(with, other.d_q), CopyOf(alone, one.d_q));
  EXPECT_EQ(CopyOf(with, other.d_v), CopyOf(alone, one.d_v));
}

TEST_F(DeviceCallTest, WrongMemoryIsNamed) {
  Case c = OnDevice();
  c.params.k.memory = 5;
  Call wrong(Start(client_, c.params));
  attend_client_answer answer = wrong.Answer();
  EXPECT_EQ(answer.code, ATTEND_CLIENT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(answer.message).find("k.memory is 5"), std::string::npos) << answer.message;
  c.params.k.memory = 1;
  Call call(Start(client_, c.params));
  answer = call.Answer();
  std::vector<float> to(c.q.size());
  EXPECT_EQ(attend_client_copy(call.get(), &answer.o, to.data(), 3, kStream),
            ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("to_memory is 3");
  EXPECT_EQ(attend_client_copy(call.get(), &answer.d_q, to.data(), 0, kStream),
            ATTEND_CLIENT_INVALID_ARGUMENT);
  EXPECT_EQ(attend_client_copy(call.get(), &answer.o, nullptr, 0, kStream),
            ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("to is NULL");
}

TEST(DeviceCall, AServerWithoutCudaIpcGetsThemOverTheHost) {
  attend_client* const client = Open();
  Case host(4, 256, 64);
  const std::vector<float> wanted = MustCall(client, host.params, "shm", 0);
  const Case c = OnDevice();
  EXPECT_EQ(MustCall(client, c.params, "shm", 0), wanted);
  attend_client_close(client);
}

}  // namespace
}  // namespace attend::client::c::test
