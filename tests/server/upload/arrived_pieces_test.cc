// SPDX-License-Identifier: Apache-2.0

#include "server/upload/arrived_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

TEST(ArrivedPieces, ASingleByteCompletesNoPiece) {
  ArrivedPieces pieces(10, 4);
  EXPECT_TRUE(pieces.Add({0, 3}).empty());
  EXPECT_TRUE(pieces.Add({5, 8}).empty());
  EXPECT_TRUE(pieces.Add({9, 10}).empty());
  EXPECT_EQ(pieces.Add({3, 4}), (std::vector<ByteRange>{{0, 4}}));
  EXPECT_EQ(pieces.Add({8, 9}), (std::vector<ByteRange>{{8, 10}})) << "the last is shorter";
  EXPECT_EQ(pieces.Add({4, 5}), (std::vector<ByteRange>{{4, 8}}));
}

TEST(ArrivedPieces, AdjacentBytesAreOneRange) {
  ArrivedPieces pieces(20, 4);
  EXPECT_TRUE(pieces.Add({9, 10}).empty());
  EXPECT_EQ(pieces.Add({0, 9}), (std::vector<ByteRange>{{0, 8}}));
  EXPECT_EQ(pieces.Add({10, 20}), (std::vector<ByteRange>{{8, 20}}));
  ArrivedPieces apart(12, 4);
  EXPECT_TRUE(apart.Add({5, 6}).empty());
  EXPECT_TRUE(apart.Add({6, 6}).empty()) << "no bytes";
  EXPECT_TRUE(apart.Add({1, 5}).empty());
  EXPECT_EQ(apart.Add({6, 12}), (std::vector<ByteRange>{{4, 12}}));
  EXPECT_EQ(apart.Add({0, 1}), (std::vector<ByteRange>{{0, 4}}));
}

TEST(ArrivedPieces, EveryByteIsPassedOnOnceUnderManyThreads) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const auto bytes = static_cast<int64_t>(1 + random() % 5000);
    const auto piece_bytes = static_cast<int64_t>(1 + random() % 700);
    std::vector<ByteRange> ranges;
    for (int64_t at = 0; at < bytes;) {
      const int64_t end = std::min(bytes, at + static_cast<int64_t>(1 + random() % 300));
      ranges.push_back({at, end});
      at = end;
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    ArrivedPieces pieces(bytes, piece_bytes);
    std::vector<int> there(static_cast<size_t>(bytes)), sent(there);
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (size_t n = t; n < ranges.size(); n += 4) {
          // Without the lock: the thread that is given a piece must see the bytes others wrote.
          for (int64_t i = ranges[n].begin; i < ranges[n].end; ++i) there[i] = 1;
          for (const ByteRange& piece : pieces.Add(ranges[n])) {
            EXPECT_EQ(std::count(there.begin() + piece.begin, there.begin() + piece.end, 1),
                      piece.end - piece.begin);
            const std::lock_guard lock(mutex);
            for (int64_t i = piece.begin; i < piece.end; ++i) ++sent[i];
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(std::count(sent.begin(), sent.end(), 1), bytes);
  }
}

}  // namespace
}  // namespace attend
