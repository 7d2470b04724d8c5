// SPDX-License-Identifier: Apache-2.0
//
// Regions that one client uses again and again, as it takes some time to make one: of host memory,
// or of a GPU's. Thread-safe.

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
  // Of regions that are made so.
  RegionPool(std::shared_ptr<SharedMemory> memory, MakeRegion make)
      : memory_(std::move(memory)), make_(std::move(make)) {}

  // A region of at least `bytes`, at least 1, with whatever was in it before. If the server refuses
  // another one, those that lie idle are let go, and it is asked again.
  Result<std::shared_ptr<SharedRegion>> Take(int64_t bytes);
  // For the next Take. Only of a region that no request may still write to.
  void GiveBack(std::shared_ptr<SharedRegion> region);

  // Memory for a caller's tensors, in a region of its own. The host's is page-aligned and initially
  // zero.
  Result<std::byte*> Allocate(int64_t bytes);
  // False: it was not allocated here. Calls that use the memory keep it until they have ended.
  bool Free(const void* data);
  // The place of a tensor that is in allocated memory, at a multiple of kSharedAlignBytes.
  std::optional<SharedPlace> Find(const void* data, int64_t bytes) const;

  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }

 private:
  // Of `wished` bytes; of `bytes` once idle ones had to go.
  Result<std::shared_ptr<SharedRegion>> Make(int64_t bytes, int64_t wished);

  const std::shared_ptr<SharedMemory> memory_;
  const MakeRegion make_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<SharedRegion>> idle_ ATTEND_GUARDED_BY(mutex_);
  std::map<const std::byte*, std::shared_ptr<SharedRegion>> allocated_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client
