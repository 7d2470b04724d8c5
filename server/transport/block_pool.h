// SPDX-License-Identifier: Apache-2.0
//
// Blocks that large messages are received into and stay in until they are used. They lie in one
// mapping, which may be page-locked, so that a GPU can read a message's tensors where they arrived.
// The most recently released block is reused first, and no memory is returned to the system. When
// all blocks are in use, further ones come from the heap.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "proto/process/block_stack.h"

namespace attend {

// Thread-safe. Must outlive its blocks.
class BlockPool {
 public:
  static constexpr size_t kBlockBytes = size_t{256} << 10;
  using Block = std::shared_ptr<char[]>;

  // Maps `bytes`, rounded up to 2 MiB; pages are allocated on first use. With 0 bytes, or if mmap
  // fails, every block comes from the heap.
  explicit BlockPool(int64_t bytes);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // May throw std::bad_alloc.
  Block Take();

  // The mapping; null and 0 if there is none.
  char* begin() const { return begin_; }
  int64_t bytes() const { return static_cast<int64_t>(block_count_ * kBlockBytes); }

 private:
  char* begin_ = nullptr;
  size_t block_count_ = 0;
  std::unique_ptr<std::atomic<uint32_t>[]> free_links_;
  BlockStack free_;
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
};

}  // namespace attend
