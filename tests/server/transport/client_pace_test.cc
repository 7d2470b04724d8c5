// SPDX-License-Identifier: Apache-2.0

#include "server/transport/client_pace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

namespace attend {
namespace {

using std::chrono::seconds;

constexpr TimePoint kStart{};
constexpr int64_t kStep = MessagePace::kProgressBytes;

TEST(MessagePaceTest, EnoughProgressRestartsTheTime) {
  MessagePace pace;
  const auto since = [&](int64_t bytes, int now, bool restart = false) {
    return (pace.Since(bytes, kStep, restart, kStart + seconds(now)) - kStart) / seconds(1);
  };
  EXPECT_EQ(since(10, 1), 1);
  EXPECT_EQ(since(10 + kStep - 1, 2), 1) << "a byte too few";
  EXPECT_EQ(since(10 + kStep, 3), 3);
  EXPECT_EQ(since(10 + 2 * kStep - 1, 4), 3) << "each step for itself";
  pace.Restart();
  EXPECT_EQ(since(10 + 2 * kStep - 1, 5), 5) << "another message";
  EXPECT_EQ(since(10 + 2 * kStep - 1, 6), 5);
  EXPECT_EQ(since(10 + 2 * kStep - 1, 7, true), 7);
}

class OutputPaceTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kEnough = thresholds::kAnswerBytesPerTimeout;

  void Add(uint64_t bytes) {
    const auto owned = std::make_shared<const std::string>(bytes, 'x');
    queue_.Refer(*owned, owned);
  }
  bool Keeps(int now, bool more = false, bool restart = false) {
    return pace_.Keeps(queue_, more, restart, kStart + seconds(now), seconds(10));
  }

  OutputQueue queue_;
  OutputPace pace_;
};

TEST_F(OutputPaceTest, AClientMustReadASmallAnswerCompletely) {
  EXPECT_TRUE(Keeps(0));
  Add(5000);
  EXPECT_TRUE(Keeps(1));
  EXPECT_TRUE(Keeps(10));
  EXPECT_FALSE(Keeps(11));
  queue_.Consume(4999);
  EXPECT_FALSE(Keeps(12)) << "a byte too few";
  queue_.Consume(1);
  EXPECT_TRUE(Keeps(13));
  EXPECT_TRUE(Keeps(99)) << "nothing waits";
}

TEST_F(OutputPaceTest, AStandstillRestartsAClientsTime) {
  Add(5000);
  EXPECT_TRUE(Keeps(1));
  EXPECT_TRUE(Keeps(20, /*more=*/false, /*restart=*/true));
  EXPECT_TRUE(Keeps(29));
  EXPECT_FALSE(Keeps(30));
}

TEST_F(OutputPaceTest, AClientMustReadEnoughOfALargeAnswer) {
  Add(4 * kEnough);
  EXPECT_TRUE(Keeps(1));
  queue_.Consume(kEnough - 1);
  EXPECT_TRUE(Keeps(10));
  EXPECT_FALSE(Keeps(11)) << "a byte too few";
  queue_.Consume(1);
  EXPECT_TRUE(Keeps(12));
  EXPECT_TRUE(Keeps(21));
  EXPECT_FALSE(Keeps(22)) << "each time";
}

TEST_F(OutputPaceTest, AClientMustReadASixteenthOfALargeAnswer) {
  Add(32 * kEnough);
  EXPECT_TRUE(Keeps(0));
  queue_.Consume(kEnough);
  EXPECT_FALSE(Keeps(10));
  queue_.Consume(kEnough);
  EXPECT_TRUE(Keeps(11));
  queue_.Consume(kEnough);
  EXPECT_FALSE(Keeps(21)) << "a sixteenth of the whole";
}

TEST_F(OutputPaceTest, LaterOutputCounts) {
  Add(5000);
  EXPECT_TRUE(Keeps(1, /*more=*/true));
  queue_.Consume(4000);
  Add(4000);
  queue_.Consume(4000);
  EXPECT_FALSE(Keeps(11, /*more=*/true)) << "small answers one by one, with large ones behind them";
}

}  // namespace
}  // namespace attend
