// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface with tensors in GPU memory, over a fake driver that is also the server's
// device, and on a server that does not support such memory.

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/c/device_fixture.h"

namespace attend::client::c::test {
namespace {

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
            (std::vector<std::string>{"wait on 7", copy, copy, copy, "record on 7", copy, lse}));
  for (int n = 0; n < 5; ++n) EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
  // A call may start before the client's thread has released the last one.
  EXPECT_LE(FakeCuda::Get().allocations(), before + 2) << "the memory is not used again";
}

TEST_F(DeviceCallTest, TheServerWaitsForTheStream) {
  Case c = OnDevice();
  const std::vector<float> right = MustCall(client_, c.params, "cuda-ipc", 1);
  const std::vector<float> q = c.q;
  c.q.assign(c.q.size(), -5);
  FakeCuda::Get().Hold();
  // Work of the caller on the same stream.
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
  c.params.q.memory = 0;  // the answer goes where q is
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
}

TEST_F(DeviceCallTest, UnsupportedTensorsGoOverTheHost) {
  Case c = OnDevice();
  const std::vector<float> wanted = MustCall(client_, c.params, "cuda-ipc", 1);
  c.params.transport = ATTEND_CLIENT_INLINE;
  EXPECT_EQ(MustCall(client_, c.params, "inline", 0), wanted);
  c.params.transport = ATTEND_CLIENT_CHUNKED;
  EXPECT_EQ(MustCall(client_, c.params, "chunked", 0), wanted);
  c.params.transport = ATTEND_CLIENT_AUTO;
  const char* const unchecked = std::exchange(c.params.request, "return_lse: true check: true");
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
  c.params.request = unchecked;
  attend_client_stream* stream = nullptr;
  ASSERT_EQ(attend_client_stream_open(client_, nullptr, nullptr, nullptr, 0, &stream),
            ATTEND_CLIENT_OK);
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

TEST_F(DeviceCallTest, WithoutRoomTensorsGoOverTheHost) {
  const Case c = OnDevice();
  FakeCuda::Get().RefuseAllocations(true);
  const std::vector<float> wanted = MustCall(client_, c.params, "shm", 0);
  FakeCuda::Get().RefuseAllocations(false);
  server_->backend().RefuseImports(Status(Code::kResourceExhausted, "no room"));
  EXPECT_EQ(MustCall(client_, c.params, "shm", 0), wanted);
  server_->backend().RefuseImports(Status());
  EXPECT_EQ(MustCall(client_, c.params, "cuda-ipc", 1), wanted);
}

// The socket belongs to another server, which imports memory but does not serve the call.
TEST_F(DeviceCallTest, TensorsThatTheServerDoesNotKnowAreSentOverTheHost) {
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

TEST_F(DeviceCallTest, TensorsOfGradientsStayOnTheDevice) {
  Case c = OnDevice();
  Call forward(Start(client_, c.params));
  const attend_client_answer answer = forward.Answer();
  ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  c.params.request = kGradients;
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

TEST_F(DeviceCallTest, ErrorsNameTheWrongMemory) {
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

TEST(DeviceCall, WithoutCudaIpcTensorsGoOverTheHost) {
  attend_client* const client = Open();
  Case host(4, 256, 64);
  const std::vector<float> wanted = MustCall(client, host.params, "shm", 0);
  const Case c = OnDevice();
  EXPECT_EQ(MustCall(client, c.params, "shm", 0), wanted);
  void* data = nullptr;
  EXPECT_EQ(attend_client_allocate(client, 1, 64, &data), ATTEND_CLIENT_FAILED_PRECONDITION);
  ExpectSays("memory is 1: the server does not compute on that GPU, or was started without");
  attend_client_close(client);
}

}  // namespace
}  // namespace attend::client::c::test
