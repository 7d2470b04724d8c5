// SPDX-License-Identifier: Apache-2.0
//
// GPU memory allocated through the C interface, and answers that stay in GPU memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/c/device_fixture.h"

namespace attend::client::c::test {
namespace {

// Q, K and V of a case in memory that the client allocated on the GPU (host memory here).
struct Allocated {
  Allocated(attend_client* client, const Case& c) : client(client), params(c.params) {
    const auto bytes = static_cast<int64_t>(c.q.size() * sizeof(float));
    void* data = nullptr;
    EXPECT_EQ(attend_client_allocate(client, 1, 3 * bytes, &data), ATTEND_CLIENT_OK)
        << attend_client_last_error();
    q = static_cast<float*>(data);
    float* next = q;
    for (const auto& [values, tensor] :
         {std::pair(&c.q, &params.q), std::pair(&c.k, &params.k), std::pair(&c.v, &params.v)}) {
      tensor->data = next;
      next = std::copy(values->begin(), values->end(), next);
    }
  }
  ~Allocated() { Release(); }
  void Release() {
    if (q == nullptr) return;
    EXPECT_EQ(attend_client_release(client, q), ATTEND_CLIENT_OK);
    q = nullptr;
  }

  attend_client* const client;
  attend_client_params params;
  float* q = nullptr;
};

class DeviceMemoryTest : public DeviceCallTest {
 protected:
  void TestReader(const std::function<void(Call&, const float*, std::vector<float>*)>& read);
};

TEST_F(DeviceMemoryTest, AllocatedMemoryIsNotCopied) {
  const Case c = OnDevice();
  const std::vector<float> wanted = MustCall(client_, c.params, "cuda-ipc", 1);
  Allocated in(client_, c);
  FakeCuda::Get().TakeLog();
  {
    Call call(Start(client_, in.params));
    const attend_client_answer answer = call.Answer();
    ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
    EXPECT_EQ(FakeCuda::Get().TakeLog(), std::vector<std::string>()) << "the stream is idle";
    EXPECT_EQ(std::memcmp(answer.o.data, wanted.data(), c.q.size() * sizeof(float)), 0);
  }
  in.params.stream = nullptr;  // unknown whether it is idle
  Call(Start(client_, in.params)).Answer();
  EXPECT_EQ(FakeCuda::Get().TakeLog(), (std::vector<std::string>{"wait on 0", "record on 0"}));
  // One of them is elsewhere.
  in.params.stream = kStream;
  in.params.k = c.params.k;
  EXPECT_EQ(MustCall(client_, in.params, "cuda-ipc", 1), wanted);
  const std::vector<std::string> log = FakeCuda::Get().TakeLog();
  const std::string copy = "copy " + std::to_string(c.q.size() * sizeof(float)) + " on 7";
  ASSERT_GT(log.size(), 3u);
  EXPECT_EQ(std::vector<std::string>(log.begin(), log.begin() + 3),
            (std::vector<std::string>{"wait on 7", copy, "record on 7"}));
  // All other ways to call accept it too, and tensors of small calls stay on the GPU.
  const Case small = OnDevice(8);
  Allocated little(client_, small);
  const std::vector<float> few = MustCall(client_, small.params, "inline", 0);
  EXPECT_EQ(MustCall(client_, little.params, "cuda-ipc", 1), few);
  little.params.transport = ATTEND_CLIENT_INLINE;
  EXPECT_EQ(MustCall(client_, little.params, "inline", 0), few);
}

TEST_F(DeviceMemoryTest, TheServerWaitsForAllStreamsOfAllocatedMemory) {
  const Case c = OnDevice();
  const std::vector<float> wanted = MustCall(client_, c.params, "cuda-ipc", 1);
  Allocated in(client_, c);
  float* const q = in.q;
  std::fill_n(q, c.q.size(), -5);
  FakeCuda::Get().Hold();
  FakeCuda::Get().TakeLog();
  FakeCuda::Get().Enqueue("write", kStream, [&] { std::copy(c.q.begin(), c.q.end(), q); });
  Call one(Start(client_, in.params));
  in.params.stream = reinterpret_cast<void*>(8);  // idle: the other stream's work counts
  Call other(Start(client_, in.params));
  FakeCuda::Get().Enqueue("work", in.params.stream, [] {});
  Call third(Start(client_, in.params));
  EXPECT_EQ(FakeCuda::Get().TakeLog(),
            (std::vector<std::string>{"write on 7", "wait on 7", "record on 7", "work on 8",
                                      "wait on 8", "record on 8"}));
  for (Call* call : {&one, &other, &third}) {
    EXPECT_FALSE(call->Wait(30'000'000)) << "the server has not waited";
  }
  in.Release();  // the calls keep it
  FakeCuda::Get().LetGo();
  for (Call* call : {&one, &other, &third}) {
    const attend_client_answer answer = call->Answer();
    ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
    EXPECT_EQ(std::memcmp(answer.o.data, wanted.data(), c.q.size() * sizeof(float)), 0);
  }
}

// `read` reads an answer on kStream, which is held; the next call must not overwrite it before
// that.
void DeviceMemoryTest::TestReader(
    const std::function<void(Call&, const float*, std::vector<float>*)>& read) {
  const Case c = OnDevice();
  Allocated in(client_, c);
  auto first = std::make_unique<Call>(Start(client_, in.params));
  const attend_client_answer answer = first->Answer();
  ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  const auto* const o = static_cast<const float*>(answer.o.data);
  const std::vector<float> right(o, o + c.q.size());
  std::vector<float> seen(right.size());
  FakeCuda::Get().Hold();
  read(*first, o, &seen);
  first.reset();
  Case other = OnDevice();
  for (float& value : other.v) value += 1;
  Allocated next(client_, other);
  next.params.stream = reinterpret_cast<void*>(8);
  // Some may start before the client's thread has released the first one, and get other memory.
  std::vector<std::unique_ptr<Call>> calls;
  do {
    calls.push_back(std::make_unique<Call>(Start(client_, next.params)));
    ASSERT_LT(calls.size(), 50u) << "the server has not waited, or the memory is not used again";
  } while (calls.back()->Wait(30'000'000));
  FakeCuda::Get().LetGo();
  const attend_client_answer second = calls.back()->Answer();
  ASSERT_EQ(second.code, ATTEND_CLIENT_OK) << second.message;
  EXPECT_EQ(second.o.data, o);
  EXPECT_EQ(seen, right);
}

TEST_F(DeviceMemoryTest, TheNextCallWaitsForKernelsThatReadTheAnswer) {
  TestReader([](Call& call, const float* o, std::vector<float>* seen) {
    FakeCuda::Get().Enqueue("read", kStream, [=] { std::copy_n(o, seen->size(), seen->begin()); });
    attend_client_used(call.get(), kStream);
  });
}

TEST_F(DeviceMemoryTest, TheNextCallWaitsForCopiesOfTheAnswer) {
  TestReader([](Call& call, const float*, std::vector<float>* seen) {
    const attend_client_tensor o = call.Answer().o;
    EXPECT_EQ(attend_client_copy(call.get(), &o, seen->data(), 1, kStream), ATTEND_CLIENT_OK);
  });
}

TEST_F(DeviceMemoryTest, AFailedAllocationHasAReason) {
  void* data = nullptr;
  EXPECT_EQ(attend_client_allocate(client_, 4, 64, &data), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("memory is 4: GPU 3: this process sees 1 of them");
  EXPECT_EQ(attend_client_allocate(client_, -1, 64, &data), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("memory is -1");
  FakeCuda::Get().RefuseAllocations(true);
  EXPECT_EQ(attend_client_allocate(client_, 1, 64, &data), ATTEND_CLIENT_RESOURCE_EXHAUSTED);
  FakeCuda::Get().RefuseAllocations(false);
  ASSERT_EQ(attend_client_allocate(client_, 1, 64, &data), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_release(client_, data), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_release(client_, data), ATTEND_CLIENT_NOT_FOUND);
}

}  // namespace
}  // namespace attend::client::c::test
