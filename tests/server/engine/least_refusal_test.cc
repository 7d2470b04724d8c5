// SPDX-License-Identifier: Apache-2.0

#include "server/engine/least_refusal.h"

#include <gtest/gtest.h>

namespace attend {
namespace {

TEST(LeastRefusal, TheShortestRetryHintOfSeveralDevicesWins) {
  LeastRefusal refused;
  Refusal told;
  EXPECT_TRUE(refused.Tell(told).ok());
  const auto add = [&](const Status& status, int64_t retry_after_ms) {
    Refusal refusal;
    refusal.retry_after_ms = retry_after_ms;
    refused.Add(status, refusal);
    return std::string(refused.Tell(told).message());
  };
  EXPECT_EQ(add(Unavailable("it is lost"), 0), "it is lost");
  EXPECT_EQ(add(ResourceExhausted("it is full"), 0), "it is full");
  EXPECT_EQ(add(ResourceExhausted("in 20 ms"), 20), "in 20 ms");
  EXPECT_EQ(add(ResourceExhausted("in 8 ms"), 8), "in 8 ms");
  EXPECT_EQ(add(ResourceExhausted("in 9 ms"), 9), "in 8 ms");
  EXPECT_EQ(add(Status(Code::kDeadlineExceeded, "never"), 0), "in 8 ms");
  EXPECT_EQ(add(ResourceExhausted("it is full"), 0), "in 8 ms");
  EXPECT_EQ(told.retry_after_ms, 8);
}

}  // namespace
}  // namespace attend
