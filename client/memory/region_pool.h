// SPDX-License-Identifier: Apache-2.0
//
// Regions that a client reuses, because making one takes time: all of host memory or all of GPU
// memory. Thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "client/memory/shared_memory.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend::client {

class RegionPool {
 public:
  using MakeRegion = std::function<Result<std::shared_ptr<SharedRegion>>(int64_t bytes)>;

  explicit RegionPool(std::shared_ptr<SharedMemory> memory);
  // `make` makes the regions.
  RegionPool(std::shared_ptr<SharedMemory> memory, MakeRegion make)
      : memory_(std::move(memory)), make_(std::move(make)) {}

  // A region of at least `bytes` (>= 1), with arbitrary contents. If the server refuses to make
  // one, idle regions are released and it is asked again.
  Result<std::shared_ptr<SharedRegion>> Take(int64_t bytes);
  // Returns a region for reuse. No request may still write to it.
  void GiveBack(std::shared_ptr<SharedRegion> region);

  // Memory for a caller's tensors, in a region of its own. Host memory is page-aligned and zeroed.
  Result<std::byte*> Allocate(int64_t bytes);
  // False: `data` was not allocated here. Calls in flight that use the memory keep it alive.
  bool Free(const void* data);
  // The place of a tensor in allocated memory; none if it is not, or not at a multiple of
  // kSharedAlignBytes.
  std::optional<SharedPlace> Find(const void* data, int64_t bytes) const;

  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }

 private:
  // A region of `wished` bytes; if idle ones had to be released first, of `bytes`.
  Result<std::shared_ptr<SharedRegion>> Make(int64_t bytes, int64_t wished);

  const std::shared_ptr<SharedMemory> memory_;
  const MakeRegion make_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<SharedRegion>> idle_ ATTEND_GUARDED_BY(mutex_);
  std::map<const std::byte*, std::shared_ptr<SharedRegion>> allocated_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
