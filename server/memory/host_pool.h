// SPDX-License-Identifier: Apache-2.0
//
// Where tensor bytes live on the host while a request is in the server, and by its byte budget the
// server's memory admission: no block, no admission. The whole budget is one piece of memory, taken
// (and with a GPU page-locked) at the start, so that no request waits for the system to lock
// memory, and none can fail for it. Without a GPU its pages come when they are first used.
//
// Thread-safe. The pool must outlive its blocks, also those that gRPC still sends from.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/memory/range_allocator.h"

namespace attend {

class HostPool;

// A block of the pool, given back by the destructor. Movable; empty when default-made or moved
// from. Data is 256-byte aligned and not initialised.
class HostBlock {
 public:
  HostBlock() = default;
  HostBlock(HostBlock&& other) noexcept { *this = std::move(other); }
  HostBlock& operator=(HostBlock&& other) noexcept;
  ~HostBlock() { Release(); }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }  // as asked for
  void Release();

 private:
  friend class HostPool;
  HostPool* pool_ = nullptr;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

class HostPool {
 public:
  // Takes `budget_bytes` from `allocator`, which must outlive the pool; the error, if it has not so
  // much, is the allocator's.
  static Result<std::unique_ptr<HostPool>> Make(HostAllocator& allocator, int64_t budget_bytes);
  ~HostPool();  // every block must have come back
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // A block of at least `bytes` (0 gives an empty block). RESOURCE_EXHAUSTED names bytes, use and
  // budget; where enough is free but not in one piece, that too.
  Result<HostBlock> Take(int64_t bytes);

  int64_t used_bytes() const;          // in blocks that are out
  int64_t largest_free_bytes() const;  // of one block
  int64_t budget_bytes() const { return budget_bytes_; }

  // What a block of `bytes` takes of the budget.
  static int64_t BlockBytes(int64_t bytes) {
    return bytes == 0 ? 0 : RangeAllocator::RoundedBytes(bytes);
  }

 private:
  friend class HostBlock;
  HostPool(HostAllocator& allocator, char* memory, int64_t budget_bytes);
  void Return(char* data, int64_t bytes);
  // Why there is no block, with what was in use and the largest free piece then.
  Status Refusal(int64_t bytes, int64_t rounded, int64_t used_bytes, int64_t largest_bytes) const;

  HostAllocator& allocator_;
  char* const memory_;
  const int64_t budget_bytes_;
  mutable std::mutex mutex_;
  RangeAllocator ranges_;
  // Everything that was ever taken lies outside of [touched_end_, untouched_end_).
  int64_t touched_end_ = 0;
  int64_t untouched_end_;
};

}  // namespace attend
