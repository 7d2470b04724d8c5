// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_table.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>

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

}  // namespace
}  // namespace attend
