// SPDX-License-Identifier: Apache-2.0

#include "server/net/open_calls.h"

#include <gtest/gtest.h>

#include <memory>

#include "server/app/config.h"

namespace attend {
namespace {

TEST(OpenCallsTest, PeersWithManyCallsLeaveSomeToPeersWithFew) {
  const auto open = std::make_shared<OpenCalls>(640, 640);
  const auto many = open->Of("many"), few = open->Of("few");
  for (int n = 0; n < 560; ++n) ASSERT_EQ(many->Begin(), nullptr) << n;
  EXPECT_NE(many->Begin(), nullptr);
  for (int n = 0; n < 10; ++n) ASSERT_EQ(few->Begin(), nullptr) << n;
  EXPECT_NE(few->Begin(), nullptr);
  EXPECT_EQ(open->Count(), 570);
}

TEST(OpenCallsTest, ASmallBoundReservesOneCallForNewPeers) {
  const auto open = std::make_shared<OpenCalls>(16, 16);
  const auto many = open->Of("many"), first = open->Of("first"), second = open->Of("second");
  for (int n = 0; n < 14; ++n) ASSERT_EQ(many->Begin(), nullptr) << n;
  EXPECT_NE(many->Begin(), nullptr);
  EXPECT_EQ(first->Begin(), nullptr);
  EXPECT_NE(first->Begin(), nullptr);
  EXPECT_EQ(second->Begin(), nullptr);
  EXPECT_EQ(open->Count(), 16);
}

TEST(OpenCallsTest, BoundsPerPeerAndConnectionFitTheTotal) {
  Config config;
  EXPECT_EQ(MaxCalls(config), 16384);
  EXPECT_EQ(MaxCallsPerPeer(config), 4096);
  config.max_calls = 2001;
  EXPECT_EQ(MaxCalls(config), 2001);
  EXPECT_EQ(MaxCallsPerPeer(config), 1024);
  EXPECT_EQ(MaxStreams(config), 1024);
  config.max_streams = 10;
  EXPECT_EQ(MaxCallsPerPeer(config), 501);
  config.max_calls_per_peer = 2000;
  EXPECT_EQ(MaxCallsPerPeer(config), 1751);  // the last eighth is never given to one peer
  config.max_calls_per_peer = 5;
  EXPECT_EQ(MaxCallsPerPeer(config), 5);
  EXPECT_EQ(MaxStreams(config), 5);
}

// Otherwise calls within a connection's announced limit could be refused.
TEST(OpenCallsTest, AConnectionsStreamsAreBoundedByTheTotal) {
  Config config;
  config.max_calls = 100;
  EXPECT_EQ(MaxCallsPerPeer(config), 88);
  EXPECT_EQ(MaxStreams(config), 88);
  config.max_calls = 1;
  EXPECT_EQ(MaxStreams(config), 1);
}

}  // namespace
}  // namespace attend
