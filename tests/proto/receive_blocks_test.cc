// SPDX-License-Identifier: Apache-2.0
//
// This program's malloc is the one with blocks, except under sanitizers: there the tests that need
// it are skipped, and the stack of blocks is tested alone.

#include "proto/process/receive_blocks.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "proto/process/block_stack.h"

namespace attend {
namespace {

TEST(BlockStack, GivesEachNumberOnceAndReusesTheLastFreed) {
  std::atomic<uint32_t> links[3] = {};
  BlockStack stack;
  EXPECT_EQ(stack.Take(), BlockStack::kNone);
  stack.Make(links, 3);
  EXPECT_FALSE(stack.GiveBack(0)) << "it was never taken";
  EXPECT_EQ(stack.Take(), 0u);
  EXPECT_EQ(stack.Take(), 1u);
  EXPECT_EQ(stack.Take(), 2u);
  EXPECT_EQ(stack.Take(), BlockStack::kNone);
  EXPECT_TRUE(stack.GiveBack(2));
  EXPECT_TRUE(stack.GiveBack(0));
  EXPECT_FALSE(stack.GiveBack(0)) << "twice";
  EXPECT_FALSE(stack.GiveBack(2)) << "twice";
  EXPECT_FALSE(stack.GiveBack(3)) << "there are three";
  EXPECT_EQ(stack.Take(), 0u);
  EXPECT_EQ(stack.Take(), 2u);
  EXPECT_EQ(stack.Take(), BlockStack::kNone);
}

// Owners write to plain memory: TSan sees it if two own one block, or one owns it too early.
TEST(BlockStack, ABlockHasOneOwner) {
  constexpr uint32_t kBlocks = 5;
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  std::atomic<uint32_t> links[kBlocks] = {};
  int64_t taken[kBlocks] = {};
  BlockStack stack;
  stack.Make(links, kBlocks);
  std::atomic<int64_t> in_vain{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        const uint32_t first = stack.Take();
        const uint32_t second = stack.Take();
        for (const uint32_t block : {first, second}) {
          if (block == BlockStack::kNone) {
            in_vain.fetch_add(1, std::memory_order_relaxed);
            continue;
          }
          ++taken[block];
          EXPECT_TRUE(stack.GiveBack(block));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t all = in_vain.load();
  for (const int64_t of_one : taken) all += of_one;
  EXPECT_EQ(all, 2 * kThreads * kRounds);
  std::set<uint32_t> free;
  for (uint32_t i = 0; i < kBlocks; ++i) free.insert(stack.Take());
  EXPECT_EQ(free, (std::set<uint32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(stack.Take(), BlockStack::kNone);
}

// Hides the calls from the compiler, which could otherwise remove them.
void* (*volatile Malloc)(size_t) = std::malloc;
void* (*volatile Realloc)(void*, size_t) = std::realloc;
void (*volatile Free)(void*) = std::free;
void* (*volatile Reallocarray)(void*, size_t, size_t) = reallocarray;

class ReceiveBlocksTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = int64_t{16} << 20;
  static constexpr size_t kLarge = 65536 + 40;  // a buffer behind gRPC's header
  static constexpr size_t kSmall = 8192 + 40;

  void SetUp() override {
    if (!kMallocHasBlocks) GTEST_SKIP() << "another malloc";
    blocks_ = ReserveReceiveBlocks(kBytes);
    ASSERT_EQ(blocks_.bytes, kBytes);
  }
  bool IsBlock(const void* data) const {
    const auto offset =
        reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(blocks_.begin);
    return offset < static_cast<uint64_t>(blocks_.bytes);
  }
  ReceiveBlocks blocks_;
};

TEST_F(ReceiveBlocksTest, OnlyReceiveBuffersAreBlocks) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks_.begin) % 4096, 0u);
  EXPECT_EQ(ReserveReceiveBlocks(2 * kBytes).begin, blocks_.begin) << "once";
  for (const size_t bytes : {kLarge, kSmall, size_t{65537}, size_t{8193}, size_t{66048}}) {
    void* const data = Malloc(bytes);
    EXPECT_TRUE(IsBlock(data)) << bytes;
    EXPECT_GE(malloc_usable_size(data), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % alignof(std::max_align_t), 0u);
    std::memset(data, 0x5a, bytes);
    Free(data);
  }
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{8192}, size_t{8705}, size_t{65536},
                             size_t{66049}, size_t{1} << 20}) {
    void* const data = Malloc(bytes);
    EXPECT_FALSE(IsBlock(data)) << bytes;
    EXPECT_GE(malloc_usable_size(data), bytes);
    Free(data);
  }
  Free(nullptr);
  EXPECT_EQ(Malloc(SIZE_MAX), nullptr);
}

TEST_F(ReceiveBlocksTest, AFreedBlockIsReused) {
  void* const first = Malloc(kLarge);
  std::thread([&] { Free(first); }).join();
  void* const second = Malloc(kLarge);
  EXPECT_EQ(second, first);
  Free(second);
}

TEST_F(ReceiveBlocksTest, BlocksDoNotOverlapAndTheHeapFollowsTheLast) {
  std::vector<char*> data;
  size_t in_blocks = 0;
  for (const size_t bytes : {kLarge, kSmall}) {
    for (size_t i = 0; i < 2 * static_cast<size_t>(kBytes) / bytes; ++i) {
      data.push_back(static_cast<char*>(Malloc(bytes)));
      ASSERT_NE(data.back(), nullptr);
      in_blocks += IsBlock(data.back()) ? bytes : 0;
      std::memset(data.back(), static_cast<int>(data.size() % 251), bytes);
    }
  }
  EXPECT_GE(in_blocks, static_cast<size_t>(kBytes) / 10 * 9) << "most of the range is blocks";
  EXPECT_LE(in_blocks, static_cast<size_t>(kBytes));
  EXPECT_FALSE(IsBlock(data.back()));
  for (size_t i = 0; i < data.size(); ++i) {
    const size_t bytes = i < 2 * static_cast<size_t>(kBytes) / kLarge ? kLarge : kSmall;
    const char mark = static_cast<char>((i + 1) % 251);
    EXPECT_EQ(data[i][0], mark);
    EXPECT_EQ(data[i][bytes / 2], mark);
    EXPECT_EQ(data[i][bytes - 1], mark);
    Free(data[i]);
  }
}

TEST_F(ReceiveBlocksTest, ReallocKeepsTheContents) {
  auto* data = static_cast<char*>(Malloc(kSmall));
  std::memset(data, 7, kSmall);
  EXPECT_EQ(Realloc(data, kSmall + 100), data) << "there is room";
  data = static_cast<char*>(Realloc(data, kLarge));  // from block to block
  EXPECT_TRUE(IsBlock(data));
  EXPECT_EQ(data[kSmall - 1], 7);
  std::memset(data, 8, kLarge);
  data = static_cast<char*>(Realloc(data, 1 << 20));  // to the heap
  EXPECT_FALSE(IsBlock(data));
  EXPECT_EQ(data[kLarge - 1], 8);
  data = static_cast<char*>(Realloc(data, 2 << 20));
  EXPECT_EQ(data[kLarge - 1], 8);
  Free(data);
  data = static_cast<char*>(Malloc(kLarge));
  data[99] = 9;
  EXPECT_EQ(Realloc(data, SIZE_MAX), nullptr) << "and it is still there";
  data = static_cast<char*>(Realloc(data, 100));
  EXPECT_FALSE(IsBlock(data));
  EXPECT_EQ(data[99], 9);
  Free(data);
  data = static_cast<char*>(Realloc(nullptr, kLarge));
  Free(data);
  data = static_cast<char*>(Malloc(kLarge));
  EXPECT_EQ(Realloc(data, 0), nullptr);
  void* const again = Malloc(kLarge);
  EXPECT_EQ(again, data) << "freed";
  Free(again);
}

TEST_F(ReceiveBlocksTest, LibrariesUseThisMallocToo) {
  const std::string text(kLarge, 'x');
  char* const copy = strdup(text.c_str());  // the C library's call of malloc
  EXPECT_TRUE(IsBlock(copy));
  EXPECT_EQ(copy, text);
  Free(copy);
  void* const made = ::operator new(kLarge);  // the C++ library's
  EXPECT_TRUE(IsBlock(made));
  ::operator delete(made);
  auto* data = static_cast<char*>(Malloc(kSmall));
  std::memset(data, 5, kSmall);
  data = static_cast<char*>(Reallocarray(data, 3, kSmall));
  EXPECT_EQ(data[kSmall - 1], 5);
  EXPECT_EQ(Reallocarray(data, SIZE_MAX / 2, 3), nullptr);
  Free(data);
  data = static_cast<char*>(std::aligned_alloc(4096, 1 << 16));
  data = static_cast<char*>(Realloc(data, kLarge));
  Free(data);
  Free(std::calloc(1, kLarge));
}

TEST_F(ReceiveBlocksTest, FreeingForeignPointersIsFatal) {
  auto* const data = static_cast<char*>(Malloc(kLarge));
  EXPECT_DEATH(Free(data + 16), "");
  EXPECT_DEATH(
      {
        Free(data);
        Free(data);
      },
      "");
  Free(data);
}

}  // namespace
}  // namespace attend
