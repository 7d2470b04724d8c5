// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

using std::chrono::seconds;
using Room = ConnectionTable::Room;

constexpr TimePoint kStart{};

TEST(ConnectionTableTest, BoundsAllConnectionsAndThoseOfEachPeer) {
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

TEST(ConnectionTableTest, FindsTheOldestSilentConnectionOfAllOrOfAPeer) {
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

std::shared_ptr<ConnectionUse> MakeUse(bool called = false) {
  auto use = std::make_shared<ConnectionUse>();
  auto marks = std::make_shared<ConnectionMarks>();
  marks->called = called;
  use->marks = std::move(marks);
  return use;
}

TEST(ConnectionTableTest, AnUnauthenticatedHealthWatchStays) {
  ConnectionTable table(4, 4);
  auto marks = std::make_shared<ConnectionMarks>();
  auto use = std::make_shared<ConnectionUse>();
  use->marks = marks;
  table.Add({5, 1, "a"}, kStart);
  table.Spoke(5);
  table.Begin(5, use, kStart);
  EXPECT_FALSE(table.OldestStranger()->stays);
  marks->watches = 1;
  EXPECT_TRUE(table.OldestStranger()->stays);
  marks->watches = 0;
  EXPECT_FALSE(table.OldestStranger()->stays);
}

TEST(ConnectionTableTest, MessagesStallOnAuthenticatedConnectionsToo) {
  ConnectionTable table(4, 4);
  const uint8_t half[] = {0, 0};
  for (const int fd : {5, 6, 7, 8}) {
    auto use = fd == 6 ? MakeUse() : std::make_shared<ConnectionUse>();
    use->messages->Open(1);
    if (fd < 8) use->messages->Add(1, half, kStart + seconds(fd), 2);
    table.Add({fd, static_cast<ino_t>(fd + 100), "a"}, kStart);
    table.Spoke(fd);
    table.Begin(fd, std::move(use), kStart);
  }
  EXPECT_TRUE(table.Stalled(kStart + seconds(14), seconds(10)).empty());
  EXPECT_EQ(table.OldestStranger()->fd, 6);
  auto stalled = table.Stalled(kStart + seconds(16), seconds(10));
  std::sort(stalled.begin(), stalled.end(), [](auto& a, auto& b) { return a.fd < b.fd; });
  ASSERT_EQ(stalled.size(), 2U);
  EXPECT_EQ(stalled[0].inode, 105U);
  EXPECT_EQ(stalled[1].fd, 6);
  for (const auto& each : stalled) table.End(each.fd);
  EXPECT_FALSE(table.OldestStranger());
  EXPECT_EQ(table.Stalled(kStart + seconds(99), seconds(10)).size(), 1U) << "each ends once";
}

TEST(ConnectionTableTest, FindsTheConnectionsWithTheLargestMessages) {
  constexpr int64_t kBuffer = CallMessages::kBufferBytes;
  ConnectionTable table(9, 9);
  std::shared_ptr<ConnectionUse> use;
  const auto add = [&](int fd, const char* peer, int64_t bytes) {
    use = std::make_shared<ConnectionUse>();
    std::vector<uint8_t> message(static_cast<size_t>(bytes), 0xff);
    use->messages->Open(1);
    use->messages->Add(1, message, kStart, bytes);
    table.Add({fd, static_cast<ino_t>(fd + 100), peer}, kStart);
    table.Spoke(fd);
    table.Begin(fd, use, kStart);
    return bytes + kBuffer;
  };
  int64_t all = add(1, "one", 500'000);
  all += add(2, "many", 300'000);
  all += add(3, "many", 200'000);
  all += add(4, "many", 100'000);
  EXPECT_TRUE(table.Largest(all).empty());
  const auto found = [&](int64_t most) {
    std::string fds;
    for (const auto& each : table.Largest(most)) fds += std::to_string(each.fd);
    return fds;
  };
  EXPECT_EQ(found(all - 1), "2") << "of the peer that has most";
  EXPECT_EQ(found(all - 300'000 - kBuffer - 1), "21") << "and then has not";
  EXPECT_EQ(found(0), "2134");
  table.End(2);
  EXPECT_EQ(found(0), "134") << "each ends once";
  use->unread_bytes = 1'000'000;
  EXPECT_EQ(found(500'000).front(), '4') << "what no call has asked for counts";
}

TEST(ConnectionTableTest, TheNumberOfUnclosedEndedConnectionsIsBounded) {
  constexpr int kMost = 100;
  ConnectionTable table(kMost, kMost);
  for (int fd = 0; fd < kMost; ++fd) {
    table.Add({fd, 1, "a"}, kStart);
    table.Spoke(fd);
    table.Begin(fd, MakeUse(fd == 7), kStart);
  }
  for (int i = 0; i < ConnectionTable::kEndingMax; ++i) {
    EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
    ASSERT_TRUE(table.MayEnd(Room::kPeerFull, "a"));
    const auto oldest = table.OldestStranger("a");
    ASSERT_TRUE(oldest);
    EXPECT_EQ(oldest->fd, i < 7 ? i : i + 1);
    table.End(oldest->fd);
    EXPECT_EQ(table.RoomFor("a"), Room::kFree);
    table.Add({kMost + i, 2, "a"}, kStart);
  }
  EXPECT_EQ(table.size(), kMost + ConnectionTable::kEndingMax);
  EXPECT_EQ(table.RoomFor("a"), Room::kPeerFull);
  EXPECT_FALSE(table.MayEnd(Room::kPeerFull, "a")) << "the process may have no descriptors left";
  EXPECT_FALSE(table.MayEnd(Room::kFull, "b"));
  table.Sweep([](int fd, ino_t) { return fd >= 7; });  // seven ended ones are closed now
  EXPECT_TRUE(table.MayEnd(Room::kPeerFull, "a"));
  EXPECT_EQ(table.size(), kMost + ConnectionTable::kEndingMax - 7);
}

// gRPC does not report when it closes a descriptor that it was given.
TEST(ConnectionTableTest, ConnectionsClosedElsewhereAreForgotten) {
  ConnectionTable table(4, 4);
  table.Add({10, 100, "a"}, kStart);
  table.Add({11, 101, "a"}, kStart);
  table.Add({12, 102, "b"}, kStart);  // silent: the listener sees its end itself
  table.Spoke(10);
  table.Spoke(11);
  const std::set<std::pair<int, ino_t>> open = {{11, 101}, {10, 999}};  // 10 is another socket now
  table.Sweep([&](int fd, ino_t inode) { return open.count({fd, inode}) == 1; });
  EXPECT_EQ(table.size(), 2);
  EXPECT_TRUE(table.IsSilent(12));
  // A reused descriptor is a new connection.
  table.Add({11, 103, "b"}, kStart);
  EXPECT_EQ(table.size(), 2);
  EXPECT_TRUE(table.IsSilent(11));
  EXPECT_EQ(table.OldestSilent("a"), std::nullopt);
}

}  // namespace
}  // namespace attend
