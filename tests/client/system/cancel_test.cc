// SPDX-License-Identifier: Apache-2.0
//
// The library calls nothing of the user's under its locks, and lets go of the user's memory on
// none of the user's threads that are inside it. So a lock of the user's may be held around every
// function that does not wait, and be taken by what the library calls.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "client/session.h"
#include "server/engine/engine.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/server/support/test_server.h"

namespace attend::client {
namespace {

using test::TestServer;

constexpr int kCalls = 2000;

// A pool of buffers, as a user's program may have one, whose lock is held around calls.
class Pool {
 public:
  std::mutex& mutex() { return mutex_; }
  // The tensor with an owner that gives it back to the pool.
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
    for (int n = 0; n < kCalls; ++n) {
      std::atomic<int> code = -1;
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
      for (auto turns = random_() % 64; turns > 0 && code < 0; --turns) std::this_thread::yield();
      {
        const std::lock_guard lock(pool_.mutex());
        handle.Cancel();
      }
      while (code < 0) std::this_thread::yield();
      ASSERT_TRUE(code == static_cast<int>(uncancelled) ||
                  code == static_cast<int>(Code::kCancelled))
          << code;
    }
    pool_.WaitForAll();
  }
  Pool& pool() { return pool_; }

 private:
  Pool pool_;
  std::minstd_rand random_{1};
};

// O is V's bytes.
void CopyV(const Attention& a) {
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

const char* const kCall = "B1,H4,L96,D32";  // 48 KiB a tensor, which are not copied

TEST(CancelledUnderALock, CallsInOneMessageAndInChunks) {
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

TEST(CancelledUnderALock, CallsThatGoOnAsOneMessage) {
  FakeServer server;
  server.SetChunked([](auto*, auto*) { return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""); });
  // Were it to take the message, the next call would not be tried in chunks.
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

TEST(CancelledUnderALock, CallsOnASession) {
  TestServer server([](Config& config) { config.session_memory_bytes = int64_t{64} << 20; });
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
    return Session::AttendAsync({&*session}, 0, lent, {}, std::move(callback));
  });
}

TEST(CancelledUnderALock, Streams) {
  TestServer server;
  server.backend().SetCompute(CopyV);
  const auto client = Connect(server.address(), 1);
  const AttentionCall call = RandomCall(kCall, 1);
  std::minstd_rand random(1);
  Pool pool;
  for (int n = 0; n < kCalls / 4; ++n) {
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
