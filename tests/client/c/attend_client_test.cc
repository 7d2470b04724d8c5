// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface, from C and from C++. The server runs in its own process: a library that
// contains the generated messages and a program that does cannot share one.

#include "client/c/attend_client.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client/c/c_calls.h"
#include "tests/client/c/plain_c.h"

namespace attend::client::c::test {
namespace {

TEST(AttendClientC, CanBeCalledFromC) {
  const Case c;
  std::vector<float> o(c.v.size());
  ASSERT_EQ(PlainAttention(TheServer().address(), c.q.data(), c.k.data(), c.v.data(), kRows, kDim,
                           o.data()),
            ATTEND_CLIENT_OK);
  ExpectClose(o.data(), Right(c, true));
}

TEST(AttendClientC, WrongStructSizesAndNullPointersAreRefused) {
  attend_client* client = nullptr;
  attend_client_options options = {};
  EXPECT_EQ(attend_client_open(nullptr, &client), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("options is NULL");
  EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("options.struct_bytes is 0");
  options.struct_bytes = sizeof(options);
  options.connections = 2000;
  EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("connections is 2000");
  client = Open();
  Case c;
  attend_client_call* call = nullptr;
  c.params.struct_bytes = 8;
  EXPECT_EQ(attend_client_start(client, &c.params, &call), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("params.struct_bytes is 8");
  EXPECT_EQ(attend_client_start(client, nullptr, &call), ATTEND_CLIENT_INVALID_ARGUMENT);
  EXPECT_EQ(attend_client_start(nullptr, &c.params, &call), ATTEND_CLIENT_INVALID_ARGUMENT);
  EXPECT_EQ(attend_client_wait(nullptr, 0, nullptr), ATTEND_CLIENT_INVALID_ARGUMENT);
  EXPECT_EQ(attend_client_release(client, c.q.data()), ATTEND_CLIENT_NOT_FOUND);
  attend_client_call_free(nullptr);
  attend_client_close(client);
  attend_client_close(nullptr);
}

void ExpectRefused(attend_client* client, const Case& c, const std::string& words) {
  Call call(Start(client, c.params));
  const attend_client_answer answer = call.Answer();
  EXPECT_EQ(answer.code, ATTEND_CLIENT_INVALID_ARGUMENT) << words;
  EXPECT_NE(std::string(answer.message).find(words), std::string::npos) << answer.message;
  EXPECT_EQ(answer.o.dtype, 0);
}

TEST(AttendClientC, ACallsErrorIsInItsAnswer) {
  attend_client* const client = Open();
  const auto expect = [client](const Case& c, const std::string& words) {
    ExpectRefused(client, c, words);
  };
  Case bad;
  bad.params.q.dtype = 9;
  expect(bad, "q.dtype is 9, must be in [1, 4]");
  bad = Case();
  bad.params.k.dims = 5;
  expect(bad, "k.dims is 5");
  bad = Case();
  bad.params.v.data = nullptr;
  expect(bad, "v.data is NULL");
  bad = Case();
  bad.params.q.shape[2] = -1;
  expect(bad, "q");
  const uint8_t bits[] = {1, 1, 1};
  for (const auto& [spoil, words] :
       std::vector<std::pair<void (*)(attend_client_tensor&), std::string>>{
           {[](auto& tree) { tree.dtype = ATTEND_CLIENT_FLOAT16; }, "tree.dtype is 1"},
           {[](auto& tree) { tree.dims = 2; }, "tree.dims is 2"},
           {[](auto& tree) { tree.shape[1] = 2; }, "tree.shape[1] is 2, must be in [1, 1]"},
           {[](auto& tree) { tree.memory = 1; }, "tree.memory is 1, must be in [0, 0]"},
           {[](auto& tree) { tree.shape[0] = 3; }, "tree has 3 bytes"}}) {
    bad = Case();
    bad.params.tree = {bits, ATTEND_CLIENT_BIT, 3, {1, 1, 1, 0}, 0, 0};
    spoil(bad.params.tree);
    expect(bad, words);
  }
  bad = Case();
  bad.params.timeout_ns = -5;
  expect(bad, "timeout_ns is -5");
  bad = Case();
  bad.params.k.shape[3] = kDim / 2;  // the server's message
  expect(bad, "k.shape[3]");
  attend_client_close(client);
}

TEST(AttendClientC, OptionsThatNoCallHasAreRefusedByName) {
  attend_client* const client = Open();
  for (const auto& [request, words] : std::vector<std::pair<const char*, std::string>>{
           {"softcop: 1", "has no field named \"softcop\""},
           {"\nmask { left: 1 }",
            "request:2:12: Message type \"attend.v1.Mask\" has no field named"},
           {"softcap: 1e300", "softcap is inf"},  // the server's message, as the next one
           {"softcap: nan", "softcap is nan"},
           {"softcap: much", "Expected double, got: much"},
           {"softcap: 1 softcap: 2", "\"softcap\" is specified multiple times"},
           {"priority: 1.5", "Expected integer, got: 1.5"},
           {"priority: 2147483648", "Integer out of range (2147483648)"},
           {"dropout_seed: -1", "Expected integer, got: -"},
           {"check: 2", "Integer out of range (2)"},
           {"kernel: cpu", "Expected string, got: cpu"},
           {"mask { kind: KIND }", "Unknown enumeration value of \"KIND\""},
           {"mask {", "request:1:7: Expected identifier"},
           {"q { dtype: DTYPE_FLOAT32 }", "request has q, which does not come as text"},
           {"raw: ''", "request has raw, which"},
           {"tree: '0'", "request has tree, which"},
           {"tree_tokens: 3", "request has tree_tokens, which"},
           {"sessions {}", "request has sessions, which"},
           {"o_placement {}", "request has o_placement, which"},
           {"backward { d_o {} }", "request has d_o, which"},
           {"backward { wanted: TENSOR_NAME_Q }",
            "request.backward.wanted is 1, must be in [9, 13]"},
           {"o_dtype: DTYPE_FLOAT16", "request.o_dtype is 1, must be q.dtype (3) or FLOAT32 (3)"},
           {"kernel: '\\377'", "must be UTF-8"},
           {"request_id: 'a\\355\\240\\200'", "must be UTF-8"},
           {"layout: 4", "layout is 4"},  // the server's message
           {"{}", "request:1:1: Expected identifier"}}) {
    Case bad;
    bad.params.request = request;
    ExpectRefused(client, bad, words);
  }
  const float one = 1;
  for (const auto& [list, words] : std::vector<std::pair<attend_client_list, std::string>>{
           {{"sinks", nullptr, 3}, "sinks is NULL"},
           {{"sinks", &one, -1}, "sinks.count is -1"},
           {{"sinks", &one, 1}, ""},  // fits: one head
           {{nullptr, &one, 1}, "lists.name is NULL"},
           {{"softcap", &one, 1}, "lists has \"softcap\", must be a list"},
           {{"sessions", &one, 1}, "lists has \"sessions\""},
           {{"sink", &one, 1}, "lists has \"sink\""}}) {
    Case bad;
    bad.params.lists = &list;
    bad.params.lists_count = 1;
    if (words.empty()) {
      EXPECT_EQ(Call(Start(client, bad.params)).Answer().code, ATTEND_CLIENT_OK);
    } else {
      ExpectRefused(client, bad, words);
    }
  }
  attend_client_close(client);
}

TEST(AttendClientC, EveryTransportGivesTheSameBits) {
  attend_client* const client = Open();
  std::vector<float> first;
  for (const auto& [transport, name] :
       {std::pair(ATTEND_CLIENT_INLINE, "inline"), std::pair(ATTEND_CLIENT_CHUNKED, "chunked"),
        std::pair(ATTEND_CLIENT_SHARED, "shm"), std::pair(ATTEND_CLIENT_AUTO, "shm")}) {
    Case c(4, 256, 64);
    c.params.transport = transport;
    c.params.request = "return_lse: true check: true";
    Call call(Start(client, c.params));
    const attend_client_answer answer = call.Answer();
    ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
    EXPECT_STREQ(answer.transport, name);
    EXPECT_TRUE(answer.checked && answer.check_ok && answer.rows_checked > 0);
    EXPECT_GT(answer.total_ns, 0);
    EXPECT_EQ(answer.lse.dims, 3);
    const auto* const o = static_cast<const float*>(answer.o.data);
    const std::vector<float> bits(o, o + c.v.size());
    if (first.empty()) first = bits;
    EXPECT_EQ(std::memcmp(bits.data(), first.data(), bits.size() * sizeof(float)), 0) << name;
  }
  void* memory = nullptr;
  ASSERT_EQ(attend_client_allocate(client, 0, 1 << 20, &memory), ATTEND_CLIENT_OK);
  Case c(4, 256, 64);
  std::memcpy(memory, c.q.data(), c.q.size() * sizeof(float));
  c.params.q.data = memory;
  {
    Call call(Start(client, c.params));
    EXPECT_EQ(std::memcmp(call.Answer().o.data, first.data(), first.size() * sizeof(float)), 0);
  }
  EXPECT_EQ(attend_client_release(client, memory), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_release(client, memory), ATTEND_CLIENT_NOT_FOUND);
  attend_client_close(client);
}

TEST(AttendClientC, GradientsWithAndWithoutTheForwardPassAreRight) {
  attend_client* const client = Open();
  Case c;
  Call forward(Start(client, c.params));
  const attend_client_answer answer = forward.Answer();
  c.params.request = kGradients;
  c.params.d_o = c.params.v;
  Call alone(Start(client, c.params));
  c.params.o = answer.o;
  c.params.lse = answer.lse;
  Call with(Start(client, c.params));
  const attend_client_answer one = alone.Answer(), other = with.Answer();
  ASSERT_EQ(one.code, ATTEND_CLIENT_OK) << one.message;
  ASSERT_EQ(other.code, ATTEND_CLIENT_OK) << other.message;
  EXPECT_EQ(one.d_k.dtype, 0);
  EXPECT_EQ(one.o.dtype, 0);
  EXPECT_EQ(std::memcmp(one.d_q.data, other.d_q.data, c.q.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(one.d_v.data, other.d_v.data, c.v.size() * sizeof(float)), 0);
  attend_client_close(client);
}

TEST(AttendClientC, TheCallbackRunsOnceAndACallCanBeCancelled) {
  attend_client* const client = Open();
  std::atomic<int> count = 0;
  Case c;
  c.params.user = &count;
  c.params.done = [](void* user) { ++*static_cast<std::atomic<int>*>(user); };
  for (int n = 1; n <= 20; ++n) {
    Call call(Start(client, c.params));
    EXPECT_EQ(call.Answer().code, ATTEND_CLIENT_OK);
    while (count < n) std::this_thread::yield();
  }
  Case bad;
  bad.params.q.dtype = 9;
  bad.params.user = &count;
  bad.params.done = c.params.done;
  attend_client_call_free(Start(client, bad.params));
  EXPECT_EQ(count, 21);

  Case large(64, 1024, 64);  // far longer than its cancellation takes
  large.params.user = &count;
  large.params.done = c.params.done;
  large.params.transport = ATTEND_CLIENT_INLINE;
  Call call(Start(client, large.params));
  EXPECT_FALSE(call.Wait(1'000'000));
  attend_client_answer none = {};
  none.struct_bytes = sizeof(none);
  EXPECT_EQ(attend_client_get(call.get(), &none), ATTEND_CLIENT_FAILED_PRECONDITION);
  attend_client_cancel(call.get());
  EXPECT_EQ(call.Answer().code, ATTEND_CLIENT_CANCELLED);
  large.params.timeout_ns = 20'000'000;
  Call late(Start(client, large.params));
  EXPECT_EQ(late.Answer().code, ATTEND_CLIENT_DEADLINE_EXCEEDED);
  attend_client_close(client);
  EXPECT_EQ(count, 23);
}

TEST(AttendClientC, AClientOutlivesItsCloseWhileInUse) {
  attend_client* const client = Open();
  attend_client_stream* stream = nullptr;
  ASSERT_EQ(attend_client_stream_open(client, nullptr, nullptr, nullptr, 0, &stream),
            ATTEND_CLIENT_OK);
  Case c;
  Call before(Start(client, c.params));
  EXPECT_EQ(before.Answer().code, ATTEND_CLIENT_OK);
  attend_client_stream_cancel(stream);
  attend_client_stream_cancel(stream);
  attend_client_call* refused = nullptr;
  ASSERT_EQ(attend_client_stream_start(stream, &c.params, &refused), ATTEND_CLIENT_OK);
  EXPECT_EQ(Call(refused).Answer().code, ATTEND_CLIENT_CANCELLED);
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) EXPECT_NE(Call(Start(client, c.params)).Answer().code, ATTEND_CLIENT_INTERNAL);
  });
  attend_client_shut_down(client);
  attend_client_shut_down(client);
  EXPECT_EQ(Call(Start(client, c.params)).Answer().code, ATTEND_CLIENT_CANCELLED);
  stop = true;
  other.join();
  attend_client_stream_close(stream);
  attend_client_close(client);
  attend_client_shut_down(nullptr);
  attend_client_stream_cancel(nullptr);
}

TEST(AttendClientC, ACallbackMayCloseTheClient) {
  struct Closing {
    attend_client* client;
    std::atomic<bool> closed = false;
  } closing{Open()};
  Case c;
  c.params.user = &closing;
  c.params.done = [](void* user) {
    auto* const closing = static_cast<Closing*>(user);
    attend_client_close(closing->client);
    closing->closed = true;
  };
  Call call(Start(closing.client, c.params));
  EXPECT_EQ(call.Answer().code, ATTEND_CLIENT_OK);
  while (!closing.closed) std::this_thread::yield();
}

}  // namespace
}  // namespace attend::client::c::test
