// SPDX-License-Identifier: Apache-2.0

#include "server/transport/block_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <thread>
#include <vector>

namespace attend {
namespace {

bool IsInRange(const BlockPool& pool, const BlockPool::Block& block) {
  return block.get() >= pool.begin() &&
         block.get() + BlockPool::kBlockBytes <= pool.begin() + pool.bytes();
}

TEST(BlockPool, GivesEachBlockOnceThenHeapBlocks) {
  BlockPool pool(3 << 20);
  EXPECT_EQ(pool.bytes(), 4 << 20);  // whole huge pages
  std::vector<BlockPool::Block> blocks;
  std::set<char*> places;
  for (int64_t i = 0; i < pool.bytes() / static_cast<int64_t>(BlockPool::kBlockBytes); ++i) {
    blocks.push_back(pool.Take());
    ASSERT_TRUE(IsInRange(pool, blocks.back()));
    places.insert(blocks.back().get());
    std::memset(blocks.back().get(), 1, BlockPool::kBlockBytes);
  }
  EXPECT_EQ(places.size(), blocks.size());
  const BlockPool::Block more = pool.Take();
  EXPECT_FALSE(IsInRange(pool, more));
  std::memset(more.get(), 1, BlockPool::kBlockBytes);
  char* const last = blocks.back().get();
  blocks.pop_back();
  EXPECT_EQ(pool.Take().get(), last);
}

TEST(BlockPool, WithoutMemoryEveryBlockIsFromTheHeap) {
  BlockPool pool(0);
  EXPECT_EQ(pool.begin(), nullptr);
  const BlockPool::Block block = pool.Take();
  std::memset(block.get(), 1, BlockPool::kBlockBytes);
}

TEST(BlockPool, ThreadsNeverShareABlock) {
  BlockPool pool(4 << 20);
  std::vector<std::thread> threads;
  for (char mine = 1; mine <= 4; ++mine) {
    threads.emplace_back([&pool, mine] {
      for (int i = 0; i < 2000; ++i) {
        const BlockPool::Block block = pool.Take();
        block[0] = block[BlockPool::kBlockBytes - 1] = mine;
        std::this_thread::yield();
        ASSERT_EQ(block[0], mine);
        ASSERT_EQ(block[BlockPool::kBlockBytes - 1], mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace attend
