// SPDX-License-Identifier: Apache-2.0
//
// Host memory for the tensors of requests in the server. Its byte budget is also the server's
// memory admission: no block, no admission. The whole budget is one allocation, made at the start
// (page-locked with a GPU), so that no request waits for the system to lock memory or fails because
// it cannot. Without a GPU, pages are committed on first use.
//
// The memory is divided among tenants as in ledger.h, but by address: a tenant finds its own part
// free and contiguous, however long other tenants hold theirs, e.g. in answers that no client
// reads.
//
// Thread-safe. The pool must outlive its blocks, including those that are still being sent.

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

// A block of the pool; the destructor returns it. Movable; empty when default-constructed or moved
// from. Data is 256-byte aligned and uninitialised.
class HostBlock {
 public:
  void* data() const { return data_.get(); }
  // As requested, not rounded.
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
  // Allocates `budget_bytes` from `allocator`, which must outlive the pool. On failure, returns the
  // allocator's error.
  static Result<std::unique_ptr<HostPool>> Make(HostAllocator& allocator, int64_t budget_bytes,
                                                const TenantWeights& tenant_weights);
  ~HostPool();  // every block must have been returned
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // A block of at least `bytes` (0 gives an empty block), from the tenant's own part if it has
  // room, else from the common part. RESOURCE_EXHAUSTED names bytes and budget.
  Result<HostBlock> Take(int tenant, int64_t bytes);
  // The size of the tenant's own part; 0 if there is one tenant only.
  int64_t own_bytes(int tenant) const { return division_.own[tenant]; }
  // The largest block that any tenant can get, and whether a tenant can hold both blocks at once.
  int64_t block_bytes_max() const { return division_.common; }  // own parts are never larger
  bool CouldTake(int tenant, int64_t one_bytes, int64_t other_bytes) const;

  int64_t used_bytes() const;          // in blocks not yet returned
  int64_t largest_free_bytes() const;  // the largest block that could be taken
  int64_t budget_bytes() const { return budget_bytes_; }

  // Bytes of the budget that a block of `bytes` takes.
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
  // A part with room and the offset in memory_; the offset is negative if neither part has room.
  std::pair<size_t, int64_t> TakeLocked(int tenant, int64_t bytes) ATTEND_REQUIRES(mutex_);

  HostAllocator& allocator_;
  char* const memory_;
  const int64_t budget_bytes_;
  const TenantParts division_;
  mutable Mutex mutex_;
  std::deque<Part> parts_ ATTEND_GUARDED_BY(mutex_);  // one per tenant, then the common part
  // Nothing in [touched_end_, untouched_end_) was ever taken; the destructor unpoisons the rest.
  int64_t touched_end_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t untouched_end_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
