// SPDX-License-Identifier: Apache-2.0
//
// Memory into which large messages are read, and where they stay until they are used: blocks of one
// range, which may be page-locked, so that a GPU reads a message's tensors where they arrived. A
// block that was in use is used again first, and none goes back to the system. When all are in use,
// blocks come from the heap.

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

  // Takes that much address space, in whole 2 MiB, which becomes memory as it is used. 0, or if the
  // system refuses: every block comes from the heap.
  explicit BlockPool(int64_t bytes);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // May throw std::bad_alloc.
  Block Take();

  // Where the blocks are that do not come from the heap; null and 0: nowhere.
  char* begin() const { return begin_; }
  int64_t bytes() const { return static_cast<int64_t>(count_ * kBlockBytes); }

 private:
  char* begin_ = nullptr;
  size_t count_ = 0;
  std::unique_ptr<std::atomic<uint32_t>[]> links_;
  BlockStack free_;
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
};

}  // namespace attend
