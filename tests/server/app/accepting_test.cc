// SPDX-License-Identifier: Apache-2.0
//
// Stop, resume and end from several threads in any order: changes are made one at a time, and the
// end cannot be undone.

#include "server/app/accepting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace attend {
namespace {

struct Server {
  std::atomic<int> changing{0};
  std::atomic<bool> accepts{true};
  Accepting accepting{[this] { Change(false); }, [this] { Change(true); }};

  void Change(bool to) {
    EXPECT_EQ(changing++, 0) << "two changes at once";
    std::this_thread::yield();
    accepts = to;
    --changing;
  }
};

TEST(AcceptingTest, AnOperatorCanStopAndResumeUntilTheEnd) {
  Server server;
  server.accepting.Stop();
  EXPECT_FALSE(server.accepts);
  server.accepting.Stop();
  EXPECT_TRUE(server.accepting.Resume().ok());
  EXPECT_TRUE(server.accepts);
  EXPECT_TRUE(server.accepting.Resume().ok());
  EXPECT_FALSE(server.accepting.ending());
  server.accepting.End();
  EXPECT_TRUE(server.accepting.ending());
  EXPECT_FALSE(server.accepts);
  EXPECT_EQ(server.accepting.Resume().code(), Code::kFailedPrecondition);
  server.accepting.Stop();
  EXPECT_FALSE(server.accepts);
}

TEST(AcceptingTest, TheEndCannotBeUndoneByOtherThreads) {
  for (int round = 0; round < 10; ++round) {
    Server server;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&server, t] {
        for (int n = 0; n < 20; ++n) {
          if ((n + t) % 2 == 0) {
            server.accepting.Stop();
          } else {
            (void)server.accepting.Resume();
          }
        }
      });
    }
    threads.emplace_back([&server] { server.accepting.End(); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_FALSE(server.accepts);
    EXPECT_EQ(server.accepting.Resume().code(), Code::kFailedPrecondition);
  }
}

}  // namespace
}  // namespace attend
