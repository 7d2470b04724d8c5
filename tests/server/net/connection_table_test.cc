// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

using std::chrono::seconds;
using Room = ConnectionTable::Room;

constexpr TimePoint kStart{};

std::shared_ptr<ConnectionUse> MakeUse(bool called = false) {
  auto use = std::make_shared<ConnectionUse>(1);
  auto marks = std::make_shared<ConnectionMarks>();
  marks->called = called;
  use->spoke = true;
  use->marks = std::move(marks);
  return use;
}

TEST(ConnectionTableTest, BoundsAllConnectionsAndThoseOfEachPeer) {
  ConnectionTable table(3, 2);
  EXPECT_EQ(table.RoomFor("a"), Room::kFree);
  table.Add(10, "a", MakeUse(), kStart);
  table.Add(11, "a", MakeUse(), kStart);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  EXPECT_EQ(table.RoomFor("b"), Room::kFree);
  table.Add(12, "b", MakeUse(), kStart);
  EXPECT_EQ(table.RoomFor("b"), Room::kFull);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  table.Remove(10);
  table.Remove(10);
  EXPECT_EQ(table.RoomFor("a"), Room::kFree);
  EXPECT_EQ(table.size(), 2);
}

// Without credentials, until its first frame.
TEST(ConnectionTableTest, FindsTheOldestStrangerOfAllOrOfAPeer) {
  ConnectionTable table(9, 9);
  EXPECT_FALSE(table.OldestStranger());
  EXPECT_FALSE(table.OldestStranger("a"));
  std::vector<std::shared_ptr<ConnectionUse>> uses;
  for (const auto& [fd, peer] : {std::pair(12, "a"), {11, "b"}, {10, "b"}}) {
    uses.push_back(std::make_shared<ConnectionUse>(1));
    table.Add(fd, peer, uses.back(), kStart + seconds(fd));
  }
  EXPECT_EQ(table.OldestStranger()->fd, 12);
  EXPECT_EQ(table.OldestStranger("b")->fd, 11);
  EXPECT_EQ(table.OldestStranger("b")->since, kStart + seconds(11));
  uses[0]->spoke = true;
  EXPECT_FALSE(table.OldestStranger("a"));
  EXPECT_EQ(table.OldestStranger()->fd, 11);
  EXPECT_TRUE(table.OldestStranger()->silent);
  table.Remove(11);
  EXPECT_EQ(table.OldestStranger("b")->fd, 10);
  table.Add(13, "a", MakeUse(), kStart);
  EXPECT_FALSE(table.OldestStranger("a")->silent);
}

TEST(ConnectionTableTest, AnUnauthenticatedHealthWatchStays) {
  ConnectionTable table(4, 4);
  auto marks = std::make_shared<ConnectionMarks>();
  auto use = std::make_shared<ConnectionUse>(1);
  use->marks = marks;
  table.Add(5, "a", use, kStart);
  EXPECT_FALSE(table.OldestStranger()->stays);
  marks->watches = 1;
  EXPECT_TRUE(table.OldestStranger()->stays);
  marks->watches = 0;
  EXPECT_FALSE(table.OldestStranger()->stays);
}

TEST(ConnectionTableTest, FindsTheConnectionsWithTheLargestMessages) {
  ConnectionTable table(9, 9);
  std::shared_ptr<ConnectionUse> use;
  const auto add = [&](int fd, const char* peer, int64_t bytes) {
    use = std::make_shared<ConnectionUse>(1);
    use->held_bytes = bytes;
    table.Add(fd, peer, use, kStart);
    return bytes;
  };
  int64_t all = add(1, "one", 500'000);
  all += add(2, "many", 300'000);
  all += add(3, "many", 200'000);
  all += add(4, "many", 100'000);
  EXPECT_TRUE(table.Largest(all).empty());
  const auto found = [&](int64_t most) {
    std::string fds;
    for (const auto& each : table.Largest(most)) fds += std::to_string(each);
    return fds;
  };
  EXPECT_EQ(found(all - 1), "2") << "of the peer that has most";
  EXPECT_EQ(found(all - 300'000 - 1), "21") << "and then has not";
  EXPECT_EQ(found(0), "2134");
  table.End(2);
  EXPECT_EQ(found(0), "134") << "each ends once";
  use->held_bytes = 1'000'000;
  EXPECT_EQ(found(500'000).front(), '4');
}

TEST(ConnectionTableTest, TheNumberOfUnclosedEndedConnectionsIsBounded) {
  constexpr int kMost = 100;
  ConnectionTable table(kMost, kMost);
  std::vector<std::shared_ptr<ConnectionUse>> uses;
  for (int fd = 0; fd < kMost; ++fd) {
    uses.push_back(MakeUse(fd == 7));
    table.Add(fd, "a", uses.back(), kStart);
  }
  for (int i = 0; i < ConnectionTable::kEndingMax; ++i) {
    EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
    ASSERT_TRUE(table.MayAdd());
    const auto oldest = table.OldestStranger("a");
    ASSERT_TRUE(oldest);
    EXPECT_EQ(oldest->fd, i < 7 ? i : i + 1);
    table.End(oldest->fd);
    EXPECT_EQ(table.RoomFor("a"), Room::kFree);
    table.Add(kMost + i, "a", MakeUse(), kStart);
  }
  EXPECT_EQ(table.size(), kMost + ConnectionTable::kEndingMax);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  EXPECT_EQ(table.RoomFor("b"), Room::kFull);
  EXPECT_FALSE(table.MayAdd()) << "the process may have no descriptors left";
  EXPECT_FALSE(table.SweepEnded());
  for (int fd = 0; fd < 7; ++fd) uses[fd]->End();
  EXPECT_TRUE(table.SweepEnded());
  EXPECT_TRUE(table.MayAdd());
  EXPECT_EQ(table.size(), kMost + ConnectionTable::kEndingMax - 7);
}

TEST(ConnectionTableTest, ConnectionsClosedElsewhereAreForgotten) {
  ConnectionTable table(4, 4);
  const auto closed = MakeUse(), open = MakeUse();
  table.Add(10, "a", closed, kStart);
  table.Add(11, "a", open, kStart);
  closed->End();
  table.Sweep();
  EXPECT_EQ(table.size(), 1);
  // A reused descriptor is a new connection.
  table.Add(11, "b", MakeUse(), kStart);
  EXPECT_EQ(table.size(), 1);
  EXPECT_FALSE(table.OldestStranger("a"));
}

}  // namespace
}  // namespace attend
