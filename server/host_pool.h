// SPDX-License-Identifier: Apache-2.0
//
// Where tensor bytes live on the host while a request is in the server, and by its byte budget the
// server's memory admission: no block, no admission. Freed blocks are kept for the next request of
// the same size class, so that the steady state neither allocates nor page-locks.
//
// Thread-safe. The pool must outlive its blocks, also those that gRPC still sends from.

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/status.h"

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
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t class_bytes_ = 0;
};

class HostPool {
 public:
  // `allocator` must outlive the pool. `budget_bytes` bounds used and kept blocks together.
  HostPool(HostAllocator& allocator, int64_t budget_bytes);
  ~HostPool();  // every block must have come back
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // A block of at least `bytes` (0 gives an empty block). RESOURCE_EXHAUSTED names bytes, use and
  // budget.
  Result<HostBlock> Take(int64_t bytes);

  int64_t used_bytes() const;    // in blocks that are out
  int64_t cached_bytes() const;  // in blocks waiting for reuse
  int64_t held_bytes() const;    // both, at one moment
  int64_t budget_bytes() const { return budget_bytes_; }

  // Bytes of the class that serves `bytes`, whatever they are: at most a quarter more, above 4 KiB.
  static int64_t ClassBytes(int64_t bytes);

 private:
  friend class HostBlock;
  void Return(void* data, int64_t class_bytes);
  // Frees cached blocks, largest first, until `bytes` more fit the budget. Returns what to free.
  std::vector<std::pair<void*, int64_t>> EvictLocked(int64_t bytes);

  HostAllocator& allocator_;
  const int64_t budget_bytes_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<void*>> cached_;  // by class bytes
  int64_t used_bytes_ = 0;
  int64_t cached_bytes_ = 0;
};

}  // namespace attend
