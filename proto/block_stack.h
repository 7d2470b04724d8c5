// SPDX-License-Identifier: Apache-2.0
//
// Which blocks of a pool are free.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace attend {

// A stack of block numbers that threads share without a lock: what was given back last is taken
// first, as it is still in some cache. A number belongs to whoever took it; what its owner wrote
// before GiveBack is seen by the next one after Take. (R. K. Treiber, "Systems Programming: Coping
// with Parallelism", 1986; the links lie outside of the blocks, and a count of changes beside the
// top keeps it from being taken for an earlier one with the same number.)
class BlockStack {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  constexpr BlockStack() = default;
  BlockStack(const BlockStack&) = delete;
  BlockStack& operator=(const BlockStack&) = delete;

  // All numbers below `count` (below kNone), the lowest on top. Once; `next`, of `count` links, is
  // alive as long as this is.
  void Fill(std::atomic<uint32_t>* next, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      next[i].store(i + 1 < count ? i + 1 : kNone, std::memory_order_relaxed);
    }
    next_ = next;
    if (count > 0) top_.store(Top(0, 0), std::memory_order_release);
  }

  uint32_t Take() {  // kNone: there is none
    uint64_t top = top_.load(std::memory_order_acquire);
    for (;;) {
      const auto block = static_cast<uint32_t>(top);
      if (block == kNone) return kNone;
      // Of a block that somebody else takes meanwhile this is anything; then the exchange fails.
      const uint32_t below = next_[block].load(std::memory_order_relaxed);
      if (top_.compare_exchange_weak(top, Top(Changes(top) + 1, below), std::memory_order_acquire,
                                     std::memory_order_acquire)) {
        return block;
      }
    }
  }

  void GiveBack(uint32_t block) {
    uint64_t top = top_.load(std::memory_order_relaxed);
    do {
      next_[block].store(static_cast<uint32_t>(top), std::memory_order_relaxed);
    } while (!top_.compare_exchange_weak(top, Top(Changes(top) + 1, block),
                                         std::memory_order_release, std::memory_order_relaxed));
  }

 private:
  static constexpr uint64_t Top(uint32_t changes, uint32_t block) {
    return uint64_t{changes} << 32 | block;
  }
  static constexpr uint32_t Changes(uint64_t top) { return static_cast<uint32_t>(top >> 32); }

  std::atomic<uint32_t>* next_ = nullptr;
  std::atomic<uint64_t> top_{kNone};
};

}  // namespace attend
