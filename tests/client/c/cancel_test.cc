// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface that are cancelled around their end, for seven ways to make one (for
// asyncio see tests/e2e/test_python_cancel.py). Each ends once, with the right answer or with
// CANCELLED, and leaves nothing behind. ATTEND_CANCELS sets how many of each; by default 10,000
// (1,000 under a sanitizer).

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/client/c/c_calls.h"

namespace attend::client::c::test {
namespace {

// Tensors above 8 KiB: smaller ones are copied, and the caller's memory is not borrowed.
constexpr int64_t kHeads = 2, kLength = 48, kWide = 32;
constexpr size_t kInFlight = 8;

int64_t Cancels() {
  const char* const asked = std::getenv("ATTEND_CANCELS");
  return asked == nullptr ? ATTEND_CANCELS : std::atoll(asked);
}

int64_t OwnMappingsOf(const char* name) {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(name) != std::string::npos;
  return count;
}

// Starts calls, cancels each before, at or after its end, and checks how it ended.
class Canceller {
 public:
  Canceller() : whole_(kHeads, kLength, kWide) {}

  Case& whole() { return whole_; }
  using Starter = std::function<attend_client_call*(const attend_client_params&)>;

  // Whether a cancellation may end calls that were not cancelled.
  void CancelsOthersToo() { others_too_ = true; }

  // `tensor`: the part of the answer that is compared.
  void Run(const Starter& start, attend_client_tensor attend_client_answer::*tensor) {
    attend_client_params params = whole_.params;
    params.user = &done_;
    params.done = [](void* user) { ++*static_cast<std::atomic<int64_t>*>(user); };
    {
      Call first(start(params));
      const attend_client_answer answer = first.Answer();
      ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
      const auto* const bytes = static_cast<const char*>((answer.*tensor).data);
      right_.assign(bytes, bytes + whole_.q.size() * sizeof(float));
    }
    std::deque<Started> calls;
    const int64_t cancels = Cancels();
    for (int64_t n = 0; n < cancels || !calls.empty(); ++n) {
      if (n < cancels) {
        // Some calls are not cancelled; they measure how long a call takes.
        calls.push_back({std::make_unique<Call>(start(params)), Clock::now(), n % 16 == 0});
        // The others are cancelled at once, or around their end.
        if (n % 4 == 1) attend_client_cancel(calls.back().call->get());
      }
      if (calls.size() < kInFlight && n < cancels) continue;
      if (!calls.front().whole) CancelSometime(calls.front());
      ASSERT_NO_FATAL_FAILURE(Judge(calls.front(), tensor));
      calls.pop_front();
    }
    while (done_ < cancels + 1) std::this_thread::yield();
    EXPECT_EQ(done_, cancels + 1);
    EXPECT_GT(cancelled_, 0) << "all cancels came too late";
    EXPECT_GT(answered_, 0) << "all cancels came too early";
    testing::Test::RecordProperty("cancelled", std::to_string(cancelled_));
    testing::Test::RecordProperty("answered", std::to_string(answered_));
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Started {
    std::unique_ptr<Call> call;
    Clock::time_point begin;
    bool whole;  // not cancelled

    int64_t age_ns() const { return std::chrono::nanoseconds(Clock::now() - begin).count(); }
  };

  // From at once to twice the duration of a call, so that many cancellations meet the answer.
  void CancelSometime(const Started& started) {
    const auto at = static_cast<int64_t>(random_() % static_cast<uint64_t>(2 * typical_ns_ + 1));
    (void)started.call->Wait(std::max<int64_t>(0, at - started.age_ns()));
    attend_client_cancel(started.call->get());
  }

  void Judge(const Started& started, attend_client_tensor attend_client_answer::*tensor) {
    const bool whole = started.whole;
    const attend_client_answer answer = started.call->Answer();
    if (answer.code == ATTEND_CLIENT_CANCELLED && (!whole || others_too_)) {
      ++cancelled_;
      return;
    }
    if (!whole) ++answered_;
    ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
    ASSERT_EQ(std::memcmp((answer.*tensor).data, right_.data(), right_.size()), 0);
    if (whole) typical_ns_ += (started.age_ns() - typical_ns_) / 8;
  }

  Case whole_;
  std::string right_;  // bytes
  std::minstd_rand random_{1};
  int64_t typical_ns_ = 1'000'000;
  bool others_too_ = false;
  int64_t cancelled_ = 0, answered_ = 0;  // of those to be cancelled
  std::atomic<int64_t> done_ = 0;         // counted by calls that may outlive a failed Run
};

class Cancelled : public testing::Test {
 protected:
  ~Cancelled() override { attend_client_close(client_); }

  Canceller::Starter Plain(int32_t transport) {
    canceller_.whole().params.transport = transport;
    return [this](const attend_client_params& params) { return Start(client_, params); };
  }

  attend_client* client_ = Open();
  Canceller canceller_;
};

TEST_F(Cancelled, CallsInOneMessageEndOnce) {
  canceller_.Run(Plain(ATTEND_CLIENT_INLINE), &attend_client_answer::o);
}

TEST_F(Cancelled, CallsInChunksEndOnce) {
  canceller_.Run(Plain(ATTEND_CLIENT_CHUNKED), &attend_client_answer::o);
}

TEST_F(Cancelled, CallsInSharedMemoryEndOnce) {
  canceller_.Run(Plain(ATTEND_CLIENT_SHARED), &attend_client_answer::o);
  attend_client_close(std::exchange(client_, nullptr));
  EXPECT_EQ(OwnMappingsOf("memfd:"), 0);
}

TEST_F(Cancelled, GradientsEndOnce) {
  attend_client_params& params = canceller_.whole().params;
  Call forward(Start(client_, params));
  const attend_client_answer answer = forward.Answer();
  params.request = kGradients;
  params.d_o = params.v;
  params.o = answer.o;
  params.lse = answer.lse;
  canceller_.Run(Plain(ATTEND_CLIENT_INLINE), &attend_client_answer::d_q);
}

TEST_F(Cancelled, CallsOnASessionEndOnce) {
  const attend_client_layer_shape shape = {ATTEND_CLIENT_FLOAT32, 0, kHeads, kWide, 0};
  attend_client_session_options options = {};
  options.struct_bytes = sizeof(options);
  options.shapes = &shape;
  options.shapes_count = 1;
  attend_client_session* session = nullptr;
  ASSERT_EQ(attend_client_session_create(client_, &options, &session), ATTEND_CLIENT_OK);
  const auto start = [session](const attend_client_params& params) {
    attend_client_call* call = nullptr;
    EXPECT_EQ(attend_client_session_start(&session, 1, 0, nullptr, &params, &call),
              ATTEND_CLIENT_OK)
        << attend_client_last_error();
    return call;
  };
  attend_client_params& params = canceller_.whole().params;
  params.transport = ATTEND_CLIENT_INLINE;
  EXPECT_EQ(Call(start(params)).Answer().code, ATTEND_CLIENT_OK);  // appends the rows
  params.k = params.v = attend_client_tensor{};
  std::atomic<bool> over = false;
  std::thread others([session, &over] {
    while (!over) {
      EXPECT_EQ(attend_client_session_keep_alive(session), ATTEND_CLIENT_OK);
      char* json = nullptr;
      EXPECT_EQ(attend_client_session_get(session, &json), ATTEND_CLIENT_OK);
      attend_client_string_free(json);
    }
  });
  canceller_.Run(start, &attend_client_answer::o);
  over = true;
  others.join();
  EXPECT_EQ(attend_client_session_length(session, 0), kLength);
  attend_client_session_free(session, 0);
}

TEST_F(Cancelled, RequestsOnAStreamEndOnce) {
  attend_client_stream* stream = nullptr;
  ASSERT_EQ(attend_client_stream_open(client_, nullptr, nullptr, nullptr, 0, &stream),
            ATTEND_CLIENT_OK);
  const auto start = [stream](const attend_client_params& params) {
    attend_client_call* call = nullptr;
    EXPECT_EQ(attend_client_stream_start(stream, &params, &call), ATTEND_CLIENT_OK);
    return call;
  };
  canceller_.Run(start, &attend_client_answer::o);
  EXPECT_EQ(attend_client_stream_finish(stream), ATTEND_CLIENT_OK) << attend_client_last_error();
  attend_client_stream_close(stream);
}

TEST_F(Cancelled, RequestsCancelledWithTheirStreamEndOnce) {
  canceller_.CancelsOthersToo();
  struct Calls {
    attend_client_stream* stream = nullptr;
    int64_t started = 0;
  } calls;
  const auto start = [this, &calls](const attend_client_params& params) {
    if (calls.started++ % kInFlight == 0) {
      if (calls.stream != nullptr) attend_client_stream_close(calls.stream);
      EXPECT_EQ(attend_client_stream_open(client_, nullptr, nullptr, nullptr, 0, &calls.stream),
                ATTEND_CLIENT_OK);
    }
    attend_client_call* call = nullptr;
    EXPECT_EQ(attend_client_stream_start(calls.stream, &params, &call), ATTEND_CLIENT_OK);
    return call;
  };
  canceller_.Run(start, &attend_client_answer::o);
  attend_client_stream_close(calls.stream);
}

}  // namespace
}  // namespace attend::client::c::test
