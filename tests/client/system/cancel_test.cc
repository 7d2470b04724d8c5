// SPDX-License-Identifier: Apache-2.0
//
// The library calls no user function under its own locks, and frees no user memory on a user's
// thread that is inside the library. So a user's lock may be held around every function that does
// not block, and around the small blocking calls, and the library's callbacks may take it.
// ATTEND_CANCELS sets the number of calls of each kind; by default 2,000 (200 under a sanitizer).

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "client/call/shared_call.h"
#include "client/session.h"
#include "client/sharded_session.h"
#include "server/engine/engine.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

using test::TestServer;

using Clock = std::chrono::steady_clock;

int Cancels() {
  const char* const asked = std::getenv("ATTEND_CANCELS");
  return asked == nullptr ? ATTEND_CANCELS : std::atoi(asked);
}

// From at once to twice the duration of such calls, so that many end at the same moment.
class SomeTime {
 public:
  std::chrono::nanoseconds Next() {
    return std::chrono::nanoseconds(random_() % static_cast<uint64_t>(2 * typical_.count() + 1));
  }
  void Took(std::chrono::nanoseconds time) { typical_ += (time - typical_) / 8; }

 private:
  std::minstd_rand random_{1};
  std::chrono::nanoseconds typical_ = std::chrono::milliseconds(1);
};

// A pool of buffers such as a user's program may have; its lock is held around calls.
class Pool {
 public:
  std::mutex& mutex() { return mutex_; }
  // The tensor with an owner that returns it to the pool.
  TensorRef Lend(TensorRef tensor) {
    if (tensor.bytes == 0) return tensor;
    ++lent_;
    tensor.owner = std::shared_ptr<const void>(
        tensor.data, [this, owner = std::move(tensor.owner)](const void*) {
          const std::lock_guard lock(mutex_);
          ++returned_;
        });
    return tensor;
  }
  AttentionCall Lend(const AttentionCall& call) {
    AttentionCall lent = call;
    ForTensors(lent, [this](v1::TensorName, TensorRef& tensor) { tensor = Lend(tensor); });
    return lent;
  }
  void WaitForAll() const {
    while (returned_ < lent_) std::this_thread::yield();
    EXPECT_EQ(returned_, lent_);
  }

 private:
  std::mutex mutex_;
  std::atomic<int64_t> lent_ = 0, returned_ = 0;
};

// Cancels calls under the lock, each some time after it began.
class Cancelling {
 public:
  using Starter = std::function<CallHandle(const AttentionCall& call, CallCallback callback)>;

  void Run(const AttentionCall& call, const Starter& start, Code uncancelled = Code::kOk) {
    int cancelled = 0, answered = 0;  // of those that Cancel was called for
    for (int n = 0; n < Cancels(); ++n) {
      std::atomic<int> code = -1;
      const Clock::time_point begin = Clock::now();
      const auto ended = [this, &code](CallOutcome outcome) {
        const std::lock_guard lock(pool_.mutex());
        code = static_cast<int>(outcome.status.code());
      };
      CallHandle handle;
      {
        const AttentionCall lent = pool_.Lend(call);
        const std::lock_guard lock(pool_.mutex());
        handle = start(lent, ended);
      }
      if (n % 16 == 0) {
        while (code < 0) std::this_thread::yield();
        ASSERT_EQ(code, static_cast<int>(uncancelled));
        time_.Took(Clock::now() - begin);
        continue;
      }
      const Clock::time_point until = begin + time_.Next();
      while (Clock::now() < until) std::this_thread::yield();
      {
        const std::lock_guard lock(pool_.mutex());
        handle.Cancel();
      }
      while (code < 0) std::this_thread::yield();
      ++(code == static_cast<int>(Code::kCancelled) ? cancelled : answered);
      ASSERT_TRUE(code == static_cast<int>(uncancelled) ||
                  code == static_cast<int>(Code::kCancelled))
          << code;
    }
    EXPECT_GT(cancelled, 0);
    EXPECT_GT(answered, 0);
    pool_.WaitForAll();
  }
  Pool& pool() { return pool_; }

 private:
  Pool pool_;
  SomeTime time_;
};

// O is V's bytes.
void CopyV(const Attention& a) {
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

const char* const kCall = "B1,H4,L96,D32";  // 48 KiB per tensor, which are not copied

TEST(CancelledUnderALock, CallsInOneMessageAndInChunksDoNotDeadlock) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 2);
  for (const CallTransport transport : {CallTransport::kInline, CallTransport::kChunked}) {
    Cancelling cancelling;
    CallOptions options;
    options.transport = transport;
    ASSERT_NO_FATAL_FAILURE(
        cancelling.Run(RandomCall(kCall, 1), [&](const AttentionCall& call, CallCallback callback) {
          return client->CallAsync(call, options, std::move(callback));
        }));
  }
}

TEST(CancelledUnderALock, CallsThatFallBackToOneMessageDoNotDeadlock) {
  FakeServer server;
  server.SetChunked([](auto*, auto*) { return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""); });
  // If it accepted the message, the next call would not be tried in chunks.
  server.SetBefore([](auto, auto*) { return grpc::Status(grpc::StatusCode::NOT_FOUND, ""); });
  const auto client = Connect(server.address(), 2, 5, /*chunked_bytes_min=*/1);
  Cancelling cancelling;
  cancelling.Run(
      RandomCall(kCall, 1),
      [&](const AttentionCall& call, CallCallback callback) {
        return client->CallAsync(call, {}, std::move(callback));
      },
      Code::kNotFound);
}

TEST(CancelledUnderALock, GradientsDoNotDeadlock) {
  FakeServer server;  // which has none
  const auto client = Connect(server.address(), 2);
  AttentionCall call = RandomCall(kCall, 1);
  call.backward.emplace();
  call.backward->o = call.backward->d_o = call.v;
  call.backward->lse = *HostTensor::Make("lse", DType::kFloat32, LseShape(call));
  Cancelling cancelling;
  cancelling.Run(
      call,
      [&](const AttentionCall& lent, CallCallback callback) {
        return client->CallAsync(lent, {}, std::move(callback));
      },
      Code::kUnimplemented);
}

TEST(CancelledUnderALock, CallsInSharedMemoryDoNotDeadlock) {
  std::string folder = std::filesystem::temp_directory_path() / "attend-cancel-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  {
    TestServer server([&](Config& config) {
      config.shared_memory = true;
      config.shared_memory_socket = folder + "/shm.sock";
    });
    server.backend().SetCompute(CopyV);
    const auto client = Connect(server.address(), 2);
    const auto memory = SharedMemory::Connect({folder + "/shm.sock"});
    ASSERT_TRUE(memory.ok()) << memory.status().ToString();
    const Result<AttentionCall> call = ShareCall(**memory, RandomCall(kCall, 1));
    ASSERT_TRUE(call.ok()) << call.status().ToString();
    Cancelling cancelling;
    cancelling.Run(*call, [&](const AttentionCall& lent, CallCallback callback) {
      return client->CallAsync(lent, {}, std::move(callback));
    });
  }
  std::filesystem::remove_all(folder);
}

void WithSessions(Config& config) { config.session_memory_bytes = int64_t{64} << 20; }

// Session::AttendAsync asks for the length after each cancelled call.
TEST(CancelledUnderALock, CallsOnASessionDoNotDeadlock) {
  TestServer server(WithSessions);
  server.backend().SetCompute([](const Attention&) {});
  const auto client = Connect(server.address(), 1);
  SessionOptions shape;
  shape.shapes = {{DType::kFloat32, 4, 32}};
  shape.layers = 1;
  Result<Session> session = Session::Create(*client, shape);
  ASSERT_TRUE(session.ok()) << session.status().ToString();
  AttentionCall call = RandomCall(kCall, 1);
  ASSERT_TRUE(session->Attend(0, call).ok());
  call.k = call.v = TensorRef();
  Cancelling cancelling;
  cancelling.Run(call, [&](const AttentionCall& lent, CallCallback callback) {
    EXPECT_TRUE(session->KeepAlive().ok());
    EXPECT_TRUE(session->Get().ok());
    EXPECT_TRUE(client->GetServerInfo(std::chrono::seconds(60)).ok());
    return Session::AttendAsync({&*session}, 0, lent, {}, std::move(callback));
  });
}

// Its calls block, so they end at their deadline.
TEST(Cancelled, ShardedSessionsCallsPastTheirDeadlineDoNotDeadlock) {
  TestServer server(WithSessions);
  server.backend().SetCompute([](const Attention&) {});
  const auto client = Connect(server.address(), 1, /*attempts=*/1);
  ShardedOptions options;
  options.session.shapes = {{DType::kFloat32, 4, 32}};
  options.session.layers = 1;
  options.shard_tokens = 32;
  Result<ShardedSession> session = ShardedSession::Create(*client, options);
  ASSERT_TRUE(session.ok()) << session.status().ToString();
  AttentionCall call = RandomCall(kCall, 1);
  ASSERT_TRUE(session->Attend(0, call).ok());
  ASSERT_EQ(session->Placement().size(), 3);
  call.k = call.v = TensorRef();
  Pool pool;
  SomeTime time;
  int late = 0, answered = 0;
  for (int n = 0; n < Cancels() / 4; ++n) {
    CallOptions bounded;
    if (n % 16 != 0) bounded.timeout = time.Next() + std::chrono::nanoseconds(1);
    const Clock::time_point begin = Clock::now();
    const Status status = session->Attend(0, pool.Lend(call), bounded).status();
    if (n % 16 == 0) {
      ASSERT_TRUE(status.ok()) << status.ToString();
      time.Took(Clock::now() - begin);
      continue;
    }
    ASSERT_TRUE(status.ok() || IsTooLate(status)) << status.ToString();
    ++(status.ok() ? answered : late);
  }
  EXPECT_GT(late, 0);
  EXPECT_GT(answered, 0);
  EXPECT_EQ(session->length(), 96);
  pool.WaitForAll();
}

TEST(CancelledUnderALock, RequestsOfAStreamDoNotDeadlock) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 1);
  const std::unique_ptr<Stream> stream = client->OpenStream();
  Cancelling cancelling;
  cancelling.Run(RandomCall(kCall, 1), [&](const AttentionCall& lent, CallCallback callback) {
    return stream->Send(lent, [callback = std::move(callback)](StreamAnswer answer) {
      callback({.status = std::move(answer.status)});
    });
  });
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(CancelledUnderALock, CancelledStreamsDoNotDeadlock) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 1);
  const AttentionCall call = RandomCall(kCall, 1);
  std::minstd_rand random(1);
  Pool pool;
  for (int n = 0; n < Cancels() / 4; ++n) {
    const std::unique_ptr<Stream> stream = client->OpenStream();
    std::atomic<int> ended = 0;
    for (int i = 0; i < 4; ++i) {
      const AttentionCall lent = pool.Lend(call);
      const std::lock_guard lock(pool.mutex());
      stream->Send(lent, [&](StreamAnswer) {
        const std::lock_guard inner(pool.mutex());
        ++ended;
      });
    }
    const int before = static_cast<int>(random() % 5);
    while (ended < before) std::this_thread::yield();
    stream->Close();
    EXPECT_EQ(ended, 4);
  }
  pool.WaitForAll();
}

}  // namespace
}  // namespace attend::client
