// SPDX-License-Identifier: Apache-2.0

#include "server/transport/output_queue.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>

#include "server/util/message.h"

namespace attend {
namespace {

// Takes all output, `most` bytes at a time.
std::string Drain(OutputQueue& queue, size_t most) {
  std::string all;
  while (!queue.empty()) {
    std::array<iovec, 3> vectors;
    const size_t count = queue.Fill(vectors);
    size_t taken = 0;
    for (size_t i = 0; i < count && taken < most; ++i) {
      const size_t bytes = std::min(vectors[i].iov_len, most - taken);
      all.append(static_cast<const char*>(vectors[i].iov_base), bytes);
      taken += bytes;
    }
    queue.Consume(taken);
  }
  return all;
}

TEST(OutputQueue, KeepsOrderAndBytes) {
  std::mt19937 random(std::random_device{}());
  for (const size_t most : {1, 7, 1000, 100000}) {
    OutputQueue queue;
    std::string sent;
    for (int i = 0; i < 100; ++i) {
      const std::string bytes(random() % 6000, static_cast<char>('a' + i % 26));
      sent += bytes;
      if (i % 2 == 0) {
        queue.Copy(bytes);
      } else {
        const OutMessage message = OutMessage::Of(bytes);
        queue.Refer(message.first.bytes, message.first.owner);
      }
    }
    EXPECT_EQ(queue.size(), sent.size());
    EXPECT_EQ(Drain(queue, most), sent);
  }
}

TEST(OutputQueue, MovesParts) {
  const OutMessage message = OutMessage::Of(std::string(5000, 'm'));
  OutputQueue from, to;
  from.Copy("head");
  from.Refer(message.first.bytes, message.first.owner);
  from.MoveTo(to, 2004);
  EXPECT_EQ(from.size(), 3000u);
  EXPECT_EQ(to.size(), 2004u);
  EXPECT_EQ(Drain(to, 100), "head" + std::string(2000, 'm'));
  from.MoveTo(to, 3000);
  EXPECT_TRUE(from.empty());
  EXPECT_EQ(Drain(to, 100), std::string(3000, 'm'));
}

TEST(OutputQueue, IsReusableOnceEmpty) {
  OutputQueue queue, to;
  for (int i = 0; i < 5; ++i) {
    const OutMessage message = OutMessage::Of(std::string(3000, 'm'));
    if (i % 2 == 0) queue.Copy("head");
    queue.Refer(message.first.bytes, message.first.owner);
    if (i % 3 == 0) queue.Copy("tail");
    const size_t size = queue.size();
    std::string sent = i % 2 == 0 ? "head" : "";
    sent += std::string(3000, 'm') + (i % 3 == 0 ? "tail" : "");
    ASSERT_EQ(size, sent.size());
    queue.MoveTo(to, size);
    EXPECT_TRUE(queue.empty());
    std::array<iovec, 1> none;
    EXPECT_EQ(queue.Fill(none), 0u);
    EXPECT_EQ(Drain(to, 1000), sent);
    EXPECT_EQ(to.gone(), to.added());
  }
}

TEST(OutputQueue, CopiesBetweenLargePiecesShareABlock) {
  OutputQueue queue;
  const OutMessage message = OutMessage::Of(std::string(3000, 'm'));
  for (int round = 0; round < 3; ++round) {
    std::string sent;
    for (int i = 0; i < 10; ++i) {
      queue.Copy("head");
      queue.Refer(message.first.bytes, message.first.owner);
      sent += "head" + std::string(message.first.bytes);
    }
    std::array<iovec, 32> vectors;
    ASSERT_EQ(queue.Fill(vectors), 20u);
    for (size_t i = 2; i < 20; i += 2) {
      EXPECT_EQ(static_cast<const char*>(vectors[i].iov_base),
                static_cast<const char*>(vectors[i - 2].iov_base) + 4);
    }
    EXPECT_EQ(Drain(queue, 5000), sent);
  }
}

TEST(OutputQueue, IsReusableAfterClear) {
  OutputQueue queue;
  const OutMessage message = OutMessage::Of(std::string(3000, 'm'));
  for (int round = 0; round < 3; ++round) {
    queue.Copy(std::string(10000, 'c'));
    queue.Refer(message.first.bytes, message.first.owner);
    queue.Consume(100);
    queue.Clear();
    EXPECT_TRUE(queue.empty());
    EXPECT_EQ(message.first.owner.use_count(), 1);
    queue.Copy("next");
    EXPECT_EQ(Drain(queue, 3), "next");
    OutputQueue moved = std::move(queue);
    queue = std::move(moved);
  }
}

TEST(OutputQueue, LargePiecesAreNotCopiedAndStayUntilSent) {
  OutputQueue queue;
  std::weak_ptr<const void> owner;
  const char* data = nullptr;
  {
    const OutMessage message = OutMessage::Of(std::string(5000, 'm'));
    owner = message.first.owner;
    data = message.first.bytes.data();
    queue.Refer(message.first.bytes, message.first.owner);
  }
  std::array<iovec, 1> vectors;
  ASSERT_EQ(queue.Fill(vectors), 1u);
  EXPECT_EQ(vectors[0].iov_base, data);
  queue.Consume(4999);
  EXPECT_FALSE(owner.expired());
  queue.Consume(1);
  EXPECT_TRUE(owner.expired());
}

}  // namespace
}  // namespace attend
