// SPDX-License-Identifier: Apache-2.0

#include "server/transport/frame_budget.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace attend {
namespace {

nghttp2_frame_hd Head(uint8_t type, size_t length, int32_t stream = 1, uint8_t flags = 0) {
  return {.length = length, .stream_id = stream, .type = type, .flags = flags, .reserved = 0};
}

// A bucket is checked before it is charged, so one more than its burst passes.
constexpr int64_t kMore = 1;

class FrameBudgetTest : public ::testing::Test {
 protected:
  // All at the same moment.
  bool Count(const nghttp2_frame_hd& head) { return budget_.Count(head, TimePoint()); }
  // How many pass at once, of at most this many.
  int64_t CountUntilRefused(const nghttp2_frame_hd& head, int64_t most) {
    int64_t count = 0;
    while (count < most && Count(head)) ++count;
    return count;
  }
  FrameBudget budget_{{.pings = {.per_second = 1, .burst = 3},
                       .resets = {.per_second = 1, .burst = 5},
                       .settings = {.per_second = 1, .burst = 2},
                       .empty = {.per_second = 1, .burst = 4}}};
};

TEST_F(FrameBudgetTest, EndsAfterItsBursts) {
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_PING, 8, 0), 100), 3 + kMore);
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_RST_STREAM, 4), 100), 5 + kMore);
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_SETTINGS, 0, 0), 100), 2 + kMore);
  EXPECT_EQ(CountUntilRefused(Head(0x77, 0), 100), 4 + kMore);
  EXPECT_FALSE(Count(Head(NGHTTP2_DATA, 0)));
  EXPECT_TRUE(budget_.Count(Head(NGHTTP2_DATA, 0), TimePoint(std::chrono::seconds(1))));
}

// For every answer, gRPC's client for Go sends a WINDOW_UPDATE and a PING.
TEST_F(FrameBudgetTest, AnAnswerAllowsAPingAndAWindowUpdate) {
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_WINDOW_UPDATE, 4, 0), 100), 8 + 4 + kMore);
  for (int call = 0; call < 10000; ++call) {
    budget_.CountSent(100);
    ASSERT_TRUE(Count(Head(NGHTTP2_WINDOW_UPDATE, 4, 0))) << call;
    ASSERT_TRUE(Count(Head(NGHTTP2_PING, 8, 0))) << call;
  }
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_PING, 8, 0), 100), 3 + kMore);
  // The allowances do not add up to a flood.
  for (int call = 0; call < 10000; ++call) budget_.CountSent(100);
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_PING, 8, 0), 10000), 512);
}

// A client that cuts messages at 16 KiB sends the rest of each in its own frame.
TEST_F(FrameBudgetTest, AFullPieceAllowsASmallOne) {
  for (int message = 0; message < 10000; ++message) {
    ASSERT_TRUE(Count(Head(NGHTTP2_DATA, 16384))) << message;
    ASSERT_TRUE(Count(Head(NGHTTP2_DATA, 5))) << message;
  }
  for (int call = 0; call < 10000; ++call) {
    budget_.CountCall();
    ASSERT_TRUE(Count(Head(NGHTTP2_DATA, 5))) << call;
    ASSERT_TRUE(Count(Head(NGHTTP2_DATA, 0, 1, NGHTTP2_FLAG_END_STREAM))) << call;
  }
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_DATA, 0, 1, NGHTTP2_FLAG_END_STREAM), 100), 4 + kMore);
}

// A client that streams small messages may learn late that its call has ended.
TEST_F(FrameBudgetTest, AnEarlyEndAllowsAWindowOfSmallPieces) {
  budget_.CountEarlyEnd(1 << 20);
  budget_.CountEarlyEnd(1 << 20);  // the allowances do not add up
  EXPECT_EQ(CountUntilRefused(Head(NGHTTP2_DATA, 8), 1 << 20), (1 << 20) / 8 + 4 + kMore);
}

TEST_F(FrameBudgetTest, AHeaderBlockMayHaveFewParts) {
  FrameBudget budget;
  EXPECT_TRUE(budget.Count(Head(NGHTTP2_HEADERS, 10), TimePoint()));
  for (int part = 0; part < FrameBudget::kContinuationsMax; ++part) {
    EXPECT_TRUE(budget.Count(Head(NGHTTP2_CONTINUATION, 10), TimePoint())) << part;
  }
  EXPECT_FALSE(budget.Count(Head(NGHTTP2_CONTINUATION, 10), TimePoint()));
  EXPECT_TRUE(budget.Count(Head(NGHTTP2_HEADERS, 10, 3), TimePoint()));
  EXPECT_TRUE(budget.Count(Head(NGHTTP2_CONTINUATION, 10), TimePoint()));
}

TEST_F(FrameBudgetTest, CountsSkippedStreamIds) {
  EXPECT_EQ(budget_.newest_stream(), -1);
  EXPECT_TRUE(Count(Head(NGHTTP2_HEADERS, 10, 1)));
  EXPECT_FALSE(budget_.MayBeLeftOut(1));
  EXPECT_TRUE(Count(Head(NGHTTP2_HEADERS, 10, 7)));
  EXPECT_EQ(budget_.newest_stream(), 7);
  EXPECT_TRUE(budget_.MayBeLeftOut(3));
  EXPECT_FALSE(budget_.MayBeLeftOut(9));
}

}  // namespace
}  // namespace attend
