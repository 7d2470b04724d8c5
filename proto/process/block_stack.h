// SPDX-License-Identifier: Apache-2.0
//
// The free list of a pool of blocks.

#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>

namespace attend {

// A lock-free stack of free block numbers, shared by threads. Last in, first out: the block
// returned last is the most likely to be in a cache. A number belongs to the thread that took it;
// whatever its owner wrote before GiveBack is visible to the next owner after Take. (R. K. Treiber,
// "Systems Programming: Coping with Parallelism", 1986. The links are outside the blocks. A change
// count beside the top prevents ABA, except for a thread that is stopped inside Take for exactly
// 2^32 changes, which take minutes.)
class BlockStack {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  constexpr BlockStack() = default;
  BlockStack(const BlockStack&) = delete;
  BlockStack& operator=(const BlockStack&) = delete;

  // Makes numbers below `count` available, none of them taken; `count` < kTaken. Must be called
  // once, before any thread calls Take. `links` has `count` zeros and must outlive this object.
  void Make(std::atomic<uint32_t>* links, uint32_t count) {
    assert(links_ == nullptr && count < kTaken);
    links_ = links;
    count_.store(count, std::memory_order_release);
  }
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  uint32_t Take() {  // kNone: all are taken
    uint64_t top = top_.load(std::memory_order_acquire);
    for (;;) {
      const auto block = static_cast<uint32_t>(top);
      if (block == kNone) return TakeFresh();
      // The link is stale if another thread has taken the block by now; the exchange then fails.
      const uint32_t below = links_[block].load(std::memory_order_relaxed);
      if (top_.compare_exchange_weak(top, Top(Changes(top) + 1, below), std::memory_order_acquire,
                                     std::memory_order_acquire)) {
        links_[block].store(kTaken, std::memory_order_relaxed);
        return block;
      }
    }
  }

  // False, without effect, if the block was not taken.
  bool GiveBack(uint32_t block) {
    if (block >= count() || links_[block].load(std::memory_order_relaxed) != kTaken) return false;
    uint64_t top = top_.load(std::memory_order_relaxed);
    do {
      links_[block].store(static_cast<uint32_t>(top), std::memory_order_relaxed);
    } while (!top_.compare_exchange_weak(top, Top(Changes(top) + 1, block),
                                         std::memory_order_release, std::memory_order_relaxed));
    return true;
  }

 private:
  static constexpr uint32_t kTaken = kNone - 1;  // as a link

  static constexpr uint64_t Top(uint32_t changes, uint32_t block) {
    return uint64_t{changes} << 32 | block;
  }
  static constexpr uint32_t Changes(uint64_t top) { return static_cast<uint32_t>(top >> 32); }

  // The lowest number that was never taken.
  uint32_t TakeFresh() {
    const uint32_t count = count_.load(std::memory_order_acquire);
    uint32_t block = fresh_.load(std::memory_order_relaxed);
    while (block < count) {
      if (fresh_.compare_exchange_weak(block, block + 1, std::memory_order_relaxed)) {
        links_[block].store(kTaken, std::memory_order_relaxed);
        return block;
      }
    }
    return kNone;
  }

  std::atomic<uint32_t>* links_ = nullptr;
  std::atomic<uint32_t> count_{0};
  // The words that change constantly have a cache line of their own.
  alignas(64) std::atomic<uint64_t> top_{kNone};
  std::atomic<uint32_t> fresh_{0};
};

}  // namespace attend
