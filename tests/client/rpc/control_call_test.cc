// SPDX-License-Identifier: Apache-2.0
//
// Small blocking calls, and the loops that they and all others run on.

#include "client/rpc/control_call.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/tool/call_spec.h"
#include "tests/client/support/fake_server.h"

namespace attend::client {
namespace {

using std::chrono::seconds;

std::unique_ptr<Client> Connect(const FakeServer& server) {
  ClientOptions options;
  options.server = server.address();
  return std::move(*Client::Make(options));
}

AttentionCall BorrowedCall() {
  return *MakeRandomCall(*ParseCallSpec("B1,H4,L96,D32"), 1);  // 48 KiB per tensor, not copied
}

TEST(ControlCalls, DeletersDoNotRunOnAWaitingThread) {
  FakeServer server;
  const auto client = Connect(server);
  std::atomic<int64_t> here = 0, lent = 0, returned = 0;
  std::atomic<bool> over = false;
  const auto waiting = std::this_thread::get_id();
  std::thread others([&] {
    const AttentionCall call = BorrowedCall();
    while (!over) {
      AttentionCall each = call;
      ForTensors(each, [&](v1::TensorName, TensorRef& tensor) {
        if (tensor.bytes == 0) return;
        ++lent;
        tensor.owner = std::shared_ptr<const void>(
            tensor.data, [&, owner = std::move(tensor.owner)](const void*) {
              if (std::this_thread::get_id() == waiting) ++here;
              ++returned;
            });
      });
      std::promise<void> ended;
      CallHandle handle =
          client->CallAsync(each, {}, [&](const CallOutcome&) { ended.set_value(); });
      if (lent % 2 == 0) handle.Cancel();
      ended.get_future().wait();
    }
  });
  for (int n = 0; n < 3000; ++n) {
    EXPECT_TRUE(client->GetServerInfo(seconds(60)).ok());
    EXPECT_TRUE(client->CheckHealth("", seconds(60)).ok());
  }
  over = true;
  others.join();
  while (returned < lent) std::this_thread::yield();
  EXPECT_GT(lent, 0);
  EXPECT_EQ(here, 0);
}

TEST(ControlCalls, ACallbackMayMakeControlCallsButNotWaitForACall) {
  FakeServer server;
  const auto client = Connect(server);  // with one completion thread
  std::promise<std::pair<Status, Code>> ended;
  client->CallAsync(BorrowedCall(), {}, [&](const CallOutcome& outcome) {
    EXPECT_TRUE(outcome.status.ok());
    Status status = client->GetServerInfo(seconds(60)).status();
    if (status.ok()) status = client->CheckHealth("", seconds(60)).status();
    ended.set_value({status, client->Call(BorrowedCall()).status().code()});
  });
  const auto [status, call] = ended.get_future().get();
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(call, Code::kFailedPrecondition);
}

TEST(ControlCalls, DestructionCancelsControlCalls) {
  FakeServer server;
  server.HoldInfo();
  auto client = Connect(server);
  Code ended = Code::kOk, later = Code::kOk;
  client->CallAsync(BorrowedCall(), {}, [&, made = client.get()](const CallOutcome&) {
    ended = made->GetServerInfo(std::chrono::nanoseconds(0)).status().code();
    later = made->CheckHealth("", std::chrono::nanoseconds(0)).status().code();
  });
  while (server.infos() == 0) std::this_thread::yield();
  client.reset();
  EXPECT_EQ(ended, Code::kCancelled);
  EXPECT_EQ(later, Code::kCancelled);
}

// The control loop sleeps while it has no calls.
TEST(ControlCalls, ManyThreadsCanWakeASleepingLoop) {
  FakeServer server;
  for (int turn = 0; turn < 20; ++turn) {
    const auto client = Connect(server);
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n) {
      threads.emplace_back([&client, n] {
        for (int call = 0; call < 5; ++call) {
          EXPECT_TRUE(client->CheckHealth("", seconds(60)).ok());
          std::this_thread::sleep_for(std::chrono::milliseconds(n));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CompletionLoops, ALoopMayPostToAnotherUntilTheEnd) {
  for (int n = 0; n < 100; ++n) {
    std::promise<void> begun;
    std::atomic<bool> ran = false;
    {
      CompletionLoops loops(2);
      loops.at(1)->Post([&, first = loops.at(0)] {
        begun.set_value();
        for (int turn = 0; turn < n; ++turn) std::this_thread::yield();
        first->Post([&] { ran = true; });
      });
      begun.get_future().wait();
    }
    EXPECT_TRUE(ran);
  }
}

}  // namespace
}  // namespace attend::client
