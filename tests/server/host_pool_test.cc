// SPDX-License-Identifier: Apache-2.0

#include "server/host_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace attend {
namespace {

// Counts what it gives and takes back, and fails when told.
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

TEST(HostPool, ClassesHoldTheirRequestAndWasteLittle) {
  for (int64_t bytes = 1; bytes < 5000; ++bytes) EXPECT_GE(HostPool::ClassBytes(bytes), bytes);
  std::mt19937_64 random(7);
  for (int i = 0; i < 10000; ++i) {
    const int64_t bytes = static_cast<int64_t>(random() >> (24 + random() % 20)) + 4097;
    const int64_t class_bytes = HostPool::ClassBytes(bytes);
    EXPECT_GE(class_bytes, bytes);
    EXPECT_LE(class_bytes, bytes + bytes / 4) << bytes;
    EXPECT_EQ(HostPool::ClassBytes(class_bytes), class_bytes) << "a class serves itself";
  }
}

TEST(HostPool, ClassesOfSizesThatNobodyHasDoNotOverflow) {
  for (int bit = 58; bit < 63; ++bit) {
    for (const int64_t more : {-1, 0, 1}) {
      const int64_t bytes = (int64_t{1} << bit) + more;
      EXPECT_GE(HostPool::ClassBytes(bytes), bytes);
    }
  }
  EXPECT_EQ(HostPool::ClassBytes(INT64_MAX), INT64_MAX);
}

TEST(HostPool, ReusesABlockOfTheSameClass) {
  CountingAllocator allocator;
  HostPool pool(allocator, 64 * kMiB);
  void* first = nullptr;
  {
    Result<HostBlock> block = pool.Take(kMiB - 5);
    ASSERT_TRUE(block.ok());
    first = block->data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 256, 0u);
    EXPECT_EQ(block->bytes(), kMiB - 5);
  }
  Result<HostBlock> again = pool.Take(kMiB - 9);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->data(), first);
  EXPECT_EQ(allocator.allocations(), 1);
}

TEST(HostPool, RefusesAboveTheBudgetAndChangesNothing) {
  CountingAllocator allocator;
  HostPool pool(allocator, 4 * kMiB);
  Result<HostBlock> kept = pool.Take(3 * kMiB);
  ASSERT_TRUE(kept.ok());
  const int64_t used = pool.used_bytes();
  for (const int64_t bytes : {2 * kMiB, 5 * kMiB, INT64_MAX}) {
    const Result<HostBlock> refused = pool.Take(bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
    EXPECT_NE(refused.status().message().find(std::to_string(bytes)), std::string::npos);
  }
  EXPECT_EQ(pool.used_bytes(), used);
  EXPECT_TRUE(pool.Take(kMiB).ok());
}

TEST(HostPool, FreesCachedBlocksToMakeRoom) {
  CountingAllocator allocator;
  HostPool pool(allocator, 8 * kMiB);
  { EXPECT_TRUE(pool.Take(6 * kMiB).ok()); }
  EXPECT_EQ(pool.cached_bytes(), 6 * kMiB);
  Result<HostBlock> other = pool.Take(4 * kMiB);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(pool.cached_bytes(), 0);
  EXPECT_LE(allocator.live_bytes(), 8 * kMiB);
}

TEST(HostPool, AFailedAllocationLeavesTheBudgetAsItWas) {
  CountingAllocator allocator;
  HostPool pool(allocator, 8 * kMiB);
  allocator.set_fail(true);
  EXPECT_FALSE(pool.Take(kMiB).ok());
  EXPECT_EQ(pool.used_bytes(), 0);
  allocator.set_fail(false);
  EXPECT_TRUE(pool.Take(8 * kMiB).ok());
}

TEST(HostPool, EmptyBlocksCostNothing) {
  CountingAllocator allocator;
  HostPool pool(allocator, kMiB);
  Result<HostBlock> block = pool.Take(0);
  ASSERT_TRUE(block.ok());
  EXPECT_EQ(block->bytes(), 0);
  EXPECT_EQ(allocator.allocations(), 0);
}

TEST(HostPool, ManyThreadsNeverExceedTheBudget) {
  CountingAllocator allocator;
  HostPool pool(allocator, 16 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      std::vector<HostBlock> held;
      for (int i = 0; i < 2000; ++i) {
        Result<HostBlock> block = pool.Take(random() % (2 * kMiB));
        if (block.ok() && block->data() != nullptr) {
          static_cast<char*>(block->data())[block->bytes() - 1] = 1;
        }
        if (block.ok()) held.push_back(std::move(*block));
        if (held.size() > 8 || !block.ok()) held.clear();
        EXPECT_LE(pool.held_bytes(), pool.budget_bytes());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.used_bytes(), 0);
}

}  // namespace
}  // namespace attend
