// SPDX-License-Identifier: Apache-2.0

#include "server/util/poll_thread.h"

#include <gtest/gtest.h>

#include <atomic>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

TEST(PollThreadTest, PollsOncePerPeriodAndEndsAtOnce) {
  test::ManualClock clock;
  std::atomic<int> looks = 0;
  {
    const PollThread thread("test-poll", std::chrono::seconds(1), clock, [&] { ++looks; });
    clock.AwaitWaiter();
    EXPECT_EQ(looks, 0) << "before the first period is over";
    for (int n = 1; n <= 3; ++n) {
      clock.Advance(std::chrono::seconds(1));
      while (looks < n) std::this_thread::yield();
      clock.AwaitWaiter();
      EXPECT_EQ(looks, n);
    }
  }
  EXPECT_EQ(looks, 3);
}

}  // namespace
}  // namespace attend
