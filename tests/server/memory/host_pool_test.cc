// SPDX-License-Identifier: Apache-2.0

#include "server/memory/host_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/util/thresholds.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

// Counts allocations and releases, and fails on request.
class CountingAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override {
    std::lock_guard lock(mutex_);
    if (fail_) return ResourceExhausted("the allocator was told to fail");
    void* data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    live_.insert({data, bytes});
    live_bytes_ += bytes;
    ++allocations_;
    return data;
  }
  void Free(void* data, int64_t bytes) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(live_.erase({data, bytes}), 1u) << "freed twice or with another size";
    live_bytes_ -= bytes;
    std::free(data);
  }
  Status Register(void*, int64_t) override { return Status(); }
  void Unregister(void*, int64_t) override {}

  void set_fail(bool fail) { fail_ = fail; }
  int64_t live_bytes() const { return live_bytes_; }
  int64_t allocations() const { return allocations_; }

 private:
  std::mutex mutex_;
  std::set<std::pair<void*, int64_t>> live_;
  int64_t live_bytes_ = 0;
  int64_t allocations_ = 0;
  bool fail_ = false;
};

constexpr int64_t kMiB = 1 << 20;

std::unique_ptr<HostPool> MakePool(CountingAllocator& allocator, int64_t budget_bytes,
                                   const TenantWeights& tenant_weights = {1}) {
  Result<std::unique_ptr<HostPool>> pool = HostPool::Make(allocator, budget_bytes, tenant_weights);
  EXPECT_TRUE(pool.ok()) << pool.status().ToString();
  return std::move(*pool);
}

TEST(HostPool, AllocatesItsMemoryOnceAndFreesIt) {
  CountingAllocator allocator;
  {
    const auto pool = MakePool(allocator, 4 * kMiB);
    EXPECT_EQ(allocator.live_bytes(), 4 * kMiB);
    for (int n = 0; n < 100; ++n) {
      Result<HostBlock> block = pool->Take(0, 1 + n * 7919);
      ASSERT_TRUE(block.ok());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 256, 0u);
      EXPECT_EQ(block->bytes(), 1 + n * 7919);
      std::memset(block->data(), n, static_cast<size_t>(block->bytes()));
    }
    EXPECT_EQ(allocator.allocations(), 1);
    EXPECT_EQ(pool->used_bytes(), 0);
    EXPECT_EQ(pool->largest_free_bytes(), 4 * kMiB);
  }
  EXPECT_EQ(allocator.live_bytes(), 0);
}

TEST(HostPool, AFailedAllocationFailsCreation) {
  CountingAllocator allocator;
  allocator.set_fail(true);
  EXPECT_EQ(HostPool::Make(allocator, kMiB, {1}).status().code(), Code::kResourceExhausted);
  EXPECT_EQ(HostPool::Make(allocator, -1, {1}).status().code(), Code::kInvalidArgument);
}

TEST(HostPool, RefusesAboveTheBudgetAndChangesNothing) {
  CountingAllocator allocator;
  const auto pool = MakePool(allocator, 4 * kMiB);
  Result<HostBlock> kept = pool->Take(0, 3 * kMiB);
  ASSERT_TRUE(kept.ok());
  for (const int64_t bytes : {kMiB + 1, 2 * kMiB, 5 * kMiB, INT64_MAX - 100, INT64_MAX}) {
    const Result<HostBlock> refused = pool->Take(0, bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
    for (const int64_t named : {bytes, 4 * kMiB}) {
      EXPECT_NE(refused.status().message().find(std::to_string(named)), std::string::npos);
    }
    EXPECT_EQ(refused.status().message().find(std::to_string(3 * kMiB)), std::string::npos)
        << "what others use is not for whom it refuses";
  }
  EXPECT_EQ(pool->used_bytes(), 3 * kMiB);
  EXPECT_TRUE(pool->Take(0, kMiB).ok());
}

TEST(HostPool, RefusesWhenFreeMemoryIsFragmented) {
  CountingAllocator allocator;
  const auto pool = MakePool(allocator, 8 * kMiB);
  std::vector<HostBlock> blocks;
  for (int n = 0; n < 4; ++n) blocks.push_back(std::move(*pool->Take(0, 2 * kMiB)));
  blocks[0].Release();
  blocks[2].Release();
  const Result<HostBlock> refused = pool->Take(0, 3 * kMiB);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no free block that large"), std::string::npos)
      << refused.status().message();
  blocks[1].Release();
  EXPECT_TRUE(pool->Take(0, 6 * kMiB).ok());
}

// Half of the 16 MiB is common; of the other half, the first tenant has 2 MiB and the second 6 MiB.
TEST(HostPool, ATenantsOwnPartIsNeverTakenOrFragmentedByOthers) {
  CountingAllocator allocator;
  const auto pool = MakePool(allocator, 16 * kMiB, {1, 3});
  std::vector<HostBlock> greedy;
  for (Result<HostBlock> block = pool->Take(1, 3 * 256); block.ok();
       block = pool->Take(1, 3 * 256)) {
    greedy.push_back(std::move(*block));
  }
  EXPECT_EQ(pool->used_bytes() / kMiB, 13);
  const Status refused = pool->Take(1, 1024).status();
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("neither in the tenant's own " + std::to_string(6 * kMiB) +
                                   " nor in the common " + std::to_string(8 * kMiB)),
            std::string::npos)
      << refused.message();
  for (size_t i = 0; i < greedy.size(); i += 2) greedy[i].Release();
  Result<HostBlock> own = pool->Take(0, 2 * kMiB);
  ASSERT_TRUE(own.ok()) << own.status().ToString();
  EXPECT_FALSE(pool->Take(0, 1024).ok()) << "what is for all lies in pieces";
  EXPECT_TRUE(pool->Take(0, 512).ok());
  greedy.clear();
  EXPECT_TRUE(pool->Take(0, 8 * kMiB).ok());
  own->Release();
  EXPECT_EQ(pool->used_bytes(), 0);
  EXPECT_EQ(pool->largest_free_bytes(), 8 * kMiB);
}

// CouldTake against an empty pool, for sizes around each bound.
TEST(HostPool, CouldTakeRefusesSizesATenantCanNeverHave) {
  CountingAllocator allocator;
  for (const TenantWeights& weights : {TenantWeights{1}, {1, 3}, {5, 1, 1}, {0, 1}}) {
    const auto pool = MakePool(allocator, kMiB, weights);
    const int64_t own = DivideByWeight(kMiB, weights, 256).own[0];
    const int64_t most = pool->block_bytes_max();
    std::vector<int64_t> sizes = {0, 1};
    for (const int64_t bound : {own, most, most - own, most / 2, kMiB}) {
      for (const int64_t more : {-256, 0, 1}) sizes.push_back(std::max<int64_t>(0, bound + more));
    }
    for (const int64_t one : sizes) {
      for (const int64_t other : sizes) {
        const Result<HostBlock> first = pool->Take(0, one);
        const Result<HostBlock> second = pool->Take(0, other);
        EXPECT_EQ(pool->CouldTake(0, one, other), first.ok() && second.ok()) << one << " " << other;
      }
    }
    EXPECT_FALSE(pool->CouldTake(0, INT64_MAX, INT64_MAX));
  }
}

TEST(HostPool, EmptyBlocksTakeNoMemory) {
  CountingAllocator allocator;
  const auto pool = MakePool(allocator, kMiB);
  Result<HostBlock> block = pool->Take(0, 0);
  ASSERT_TRUE(block.ok());
  EXPECT_EQ(block->bytes(), 0);
  EXPECT_EQ(pool->used_bytes(), 0);
}

// Every block keeps its holder's bytes while other threads take and return blocks.
TEST(HostPool, ManyThreadsNeverShareABlock) {
  CountingAllocator allocator;
  const auto pool = MakePool(allocator, 16 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      const auto ends_hold = [t](const HostBlock& block) {
        const char* const data = static_cast<const char*>(block.data());
        return block.bytes() == 0 || (data[0] == t && data[block.bytes() - 1] == t);
      };
      std::vector<HostBlock> held;
      for (int i = 0; i < 2000; ++i) {
        Result<HostBlock> block = pool->Take(0, random() % (2 * kMiB));
        if (block.ok() && block->bytes() > 0) {
          static_cast<char*>(block->data())[0] = static_cast<char>(t);
          static_cast<char*>(block->data())[block->bytes() - 1] = static_cast<char>(t);
        }
        const bool full = !block.ok() || held.size() >= 8;
        if (block.ok()) held.push_back(std::move(*block));
        if (!full) continue;
        for (const HostBlock& each : held) EXPECT_TRUE(ends_hold(each));
        held.clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->used_bytes(), 0);
  EXPECT_EQ(pool->largest_free_bytes(), 16 * kMiB);
}

// Compared with a map of all units: ranges never overlap, and a request fails only if no gap fits
// it.
TEST(RangeAllocator, AgreesWithAModel) {
  constexpr int64_t kUnit = RangeAllocator::kUnitBytes;
  constexpr int64_t kUnits = 3 * thresholds::kSmallRangeBytesMax / kUnit;
  const uint64_t seed = test::FreshSeed();
  std::mt19937_64 random(seed);
  RangeAllocator ranges(kUnits * kUnit + 77);
  EXPECT_EQ(ranges.capacity(), kUnits * kUnit);
  std::vector<char> taken(kUnits, 0);
  std::vector<std::pair<int64_t, int64_t>> held;
  const auto longest_hole = [&taken] {
    int64_t longest = 0, length = 0;
    for (const char each : taken) longest = std::max(longest, length = each ? 0 : length + 1);
    return longest * kUnit;
  };
  for (int n = 0; n < 1500; ++n) {
    if (random() % 2 == 0 || held.empty()) {
      const int64_t bytes_max = random() % 8 == 0 ? kUnits * kUnit : kUnits * kUnit / 40;
      const int64_t bytes = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(bytes_max));
      const int64_t longest = longest_hole();
      ASSERT_EQ(ranges.largest_free_bytes(), longest) << "seed " << seed;
      const int64_t begin = ranges.Take(bytes);
      ASSERT_EQ(begin >= 0, RangeAllocator::RoundedBytes(bytes) <= longest) << "seed " << seed;
      if (begin < 0) continue;
      ASSERT_EQ(begin % kUnit, 0);
      for (int64_t at = begin; at < begin + bytes; at += kUnit) {
        ASSERT_EQ(taken[at / kUnit], 0) << "seed " << seed;
        taken[at / kUnit] = 1;
      }
      held.emplace_back(begin, bytes);
    } else {
      std::swap(held[random() % held.size()], held.back());
      const auto [begin, bytes] = held.back();
      held.pop_back();
      ranges.Return(begin, bytes);
      for (int64_t at = begin; at < begin + bytes; at += kUnit) taken[at / kUnit] = 0;
    }
    ASSERT_EQ(ranges.used_bytes(), std::count(taken.begin(), taken.end(), 1) * kUnit);
  }
  for (const auto& [begin, bytes] : held) ranges.Return(begin, bytes);
  EXPECT_EQ(ranges.largest_free_bytes(), ranges.capacity());
}

}  // namespace
}  // namespace attend
