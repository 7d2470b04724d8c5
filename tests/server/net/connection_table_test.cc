// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_table.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "server/net/connection_limits.h"

namespace attend {
namespace {

using std::chrono::seconds;
using Room = ConnectionTable::Room;

constexpr TimePoint kStart{};

TEST(ConnectionTableTest, BoundsAllAndEachPeer) {
  ConnectionTable table(3, 2);
  EXPECT_EQ(table.RoomFor("a"), Room::kFree);
  table.Add({10, 100, "a"}, kStart);
  table.Add({11, 101, "a"}, kStart);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  EXPECT_EQ(table.RoomFor("b"), Room::kFree);
  table.Add({12, 102, "b"}, kStart);
  EXPECT_EQ(table.RoomFor("b"), Room::kFull);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  table.Remove(10);
  table.Remove(10);
  EXPECT_EQ(table.RoomFor("a"), Room::kFree);
  EXPECT_EQ(table.size(), 2);
}

TEST(ConnectionTableTest, TheOldestSilentIsOfAllOrOfAPeer) {
  ConnectionTable table(9, 9);
  EXPECT_EQ(table.OldestSilent(), std::nullopt);
  EXPECT_EQ(table.OldestSilent("a"), std::nullopt);
  EXPECT_EQ(table.OldestSilentSince(), kNever);
  table.Add({12, 1, "a"}, kStart + seconds(1));
  table.Add({11, 2, "b"}, kStart + seconds(2));
  table.Add({10, 3, "b"}, kStart + seconds(3));
  EXPECT_EQ(table.OldestSilent(), 12);
  EXPECT_EQ(table.OldestSilent("b"), 11);
  table.Spoke(12);
  table.Spoke(12);
  EXPECT_FALSE(table.IsSilent(12));
  EXPECT_TRUE(table.IsSilent(11));
  EXPECT_FALSE(table.IsSilent(99));
  EXPECT_EQ(table.OldestSilent("a"), std::nullopt);
  EXPECT_EQ(table.OldestSilent(), 11);
  EXPECT_EQ(table.OldestSilentSince(), kStart + seconds(2));
  table.Remove(11);
  EXPECT_EQ(table.OldestSilent("b"), 10);
}

// gRPC does not say when it closes what it was given.
TEST(ConnectionTableTest, WhatIsClosedByOthersIsForgotten) {
  ConnectionTable table(4, 4);
  table.Add({10, 100, "a"}, kStart);
  table.Add({11, 101, "a"}, kStart);
  table.Add({12, 102, "b"}, kStart);  // silent: its end is seen here
  table.Spoke(10);
  table.Spoke(11);
  const std::set<std::pair<int, ino_t>> open = {{11, 101}, {10, 999}};  // 10 is another socket now
  table.Sweep([&](int fd, ino_t inode) { return open.count({fd, inode}) == 1; });
  EXPECT_EQ(table.size(), 2);
  EXPECT_TRUE(table.IsSilent(12));
  // A descriptor that comes again is another connection.
  table.Add({11, 103, "b"}, kStart);
  EXPECT_EQ(table.size(), 2);
  EXPECT_TRUE(table.IsSilent(11));
  EXPECT_EQ(table.OldestSilent("a"), std::nullopt);
}

TEST(ConnectionLimitsTest, FollowTheDescriptors) {
  const auto limits = [](int64_t connections, int64_t per_peer, int64_t descriptors) {
    return LimitConnections({connections, per_peer}, descriptors);
  };
  const auto expect = [](const Result<ConnectionLimits>& got, int64_t connections,
                         int64_t per_peer) {
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_EQ(got->connections, connections);
    EXPECT_EQ(got->per_peer, per_peer);
  };
  expect(limits(0, 0, 200), 136, 34);  // 64 are others'
  expect(limits(0, 0, 1024), 768, 192);
  expect(limits(0, 0, int64_t{1} << 30), 16384, 4096);
  expect(limits(0, 0, 10), 1, 1);
  expect(limits(100, 0, 1024), 100, 25);
  expect(limits(100, 500, 1024), 100, 100);
  expect(limits(960, 7, 1024), 960, 7);
  const Result<ConnectionLimits> refused = limits(961, 0, 1024);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("961 must be at most 960"), std::string::npos)
      << refused.status().message();
}

}  // namespace
}  // namespace attend
