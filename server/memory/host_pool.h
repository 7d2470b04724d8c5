// SPDX-License-Identifier: Apache-2.0
//
// The host memory of tensors while their request is in the server. Its byte budget is also the
// server's memory admission: no block, no admission. The whole budget is one piece of memory,
// allocated (and with a GPU page-locked) at the start, so that no request waits for the system to
// lock memory, or fails because it cannot. Without a GPU, pages are committed when they are first
// used.
//
// It is divided among the tenants as ledger.h says, by place: a tenant finds its own part
// free and in one piece, however long others hold theirs, as with answers that nobody reads.
//
// Thread-safe. The pool must outlive its blocks, including those that gRPC still sends from.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/ledger.h"
#include "server/memory/range_allocator.h"
#include "server/util/weight_share.h"

namespace attend {

class HostPool;

// A block of the pool, returned by the destructor. Movable; empty when default-constructed or moved
// from. Data is 256-byte aligned and uninitialised.
class HostBlock {
 public:
  void* data() const { return data_.get(); }
  // As requested.
  int64_t bytes() const { return data_ == nullptr ? 0 : data_.get_deleter().bytes; }
  void Release() { data_.reset(); }

 private:
  friend class HostPool;
  struct Return {
    void operator()(char* data) const;
    HostPool* pool;
    int64_t bytes;
    size_t part;
  };
  std::unique_ptr<char, Return> data_;
};

class HostPool {
 public:
  // Allocates `budget_bytes` from `allocator`, which must outlive the pool. If that fails, the
  // error is the allocator's.
  static Result<std::unique_ptr<HostPool>> Make(HostAllocator& allocator, int64_t budget_bytes,
                                                const TenantWeights& tenant_weights);
  ~HostPool();  // every block must have been returned
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // A block of at least `bytes` (0 gives an empty block), of the tenant's own part as long as that
  // has room. RESOURCE_EXHAUSTED names bytes and budget.
  Result<HostBlock> Take(int tenant, int64_t bytes);
  // The tenant's own part; 0 where there is no other tenant.
  int64_t own_bytes(int tenant) const { return division_.own[tenant]; }
  // The largest block that a tenant can ever have, and whether it can have two such blocks.
  int64_t block_bytes_max() const { return division_.common; }  // no tenant has more alone
  bool CouldTake(int tenant, int64_t one_bytes, int64_t other_bytes) const;

  int64_t used_bytes() const;          // in blocks not yet returned
  int64_t largest_free_bytes() const;  // of one block
  int64_t budget_bytes() const { return budget_bytes_; }

  // How much of the budget a block of `bytes` takes.
  static int64_t BlockBytes(int64_t bytes) {
    return bytes == 0 ? 0 : RangeAllocator::RoundedBytes(bytes);
  }

 private:
  friend class HostBlock;
  struct Part {
    Part(int64_t begins, int64_t bytes) : begin(begins), ranges(bytes) {}
    const int64_t begin;  // in memory_
    RangeAllocator ranges;
  };

  HostPool(HostAllocator& allocator, char* memory, int64_t budget_bytes,
           const TenantWeights& tenant_weights);
  void Return(char* data, int64_t bytes, size_t index);
  Status Refusal(int tenant, int64_t bytes) const;
  // The index of a part that has room, and where in memory_; the latter is below 0 if none has.
  std::pair<size_t, int64_t> TakeLocked(int tenant, int64_t bytes) ATTEND_REQUIRES(mutex_);

  HostAllocator& allocator_;
  char* const memory_;
  const int64_t budget_bytes_;
  const TenantParts division_;
  mutable Mutex mutex_;
  std::deque<Part> parts_ ATTEND_GUARDED_BY(mutex_);  // of each tenant, and last the common one
  // Everything that was ever taken is outside [touched_end_, untouched_end_).
  int64_t touched_end_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t untouched_end_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
