// SPDX-License-Identifier: Apache-2.0
//
// Allocates the memory of shared regions: a sealed memfd, with all of its pages present and
// page-locked by the backend, so that neither a client's truncation nor lack of memory can make the
// server's own reads fail.

#pragma once

#include <cstdint>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

// A region's memory in this process, and the file from which another process maps it.
struct RegionMapping {
  UniqueFd file;
  void* data = nullptr;  // page-aligned
  int64_t bytes = 0;
};

// What becomes of a region's pages, which other processes may have mapped, when it is unmapped
// here.
enum class Pages {
  kFreed,  // those processes' memory is zeros from then on
  kKept,   // as it was, for as long as one of them has the file or a mapping
};

// Thread-safe. Calls may take long, for page-locking or for a device's synchronisation.
class RegionMemory {
 public:
  virtual ~RegionMemory() = default;
  // `bytes` must be a multiple of page_bytes(). RESOURCE_EXHAUSTED if there is not enough memory.
  virtual Result<RegionMapping> Map(int64_t bytes) = 0;
  // The memory must no longer be in use here.
  virtual void Unlock(void* data, int64_t bytes) = 0;
  // Once it is unlocked. Other processes' mappings of it stay.
  virtual void Unmap(void* data, int64_t bytes, Pages pages) = 0;
  virtual int64_t page_bytes() const = 0;
};

class MemfdMemory final : public RegionMemory {
 public:
  // `allocator` page-locks the memory and must outlive this object.
  explicit MemfdMemory(HostAllocator& allocator);

  Result<RegionMapping> Map(int64_t bytes) override;
  void Unlock(void* data, int64_t bytes) override;
  void Unmap(void* data, int64_t bytes, Pages pages) override;
  int64_t page_bytes() const override { return page_bytes_; }

 private:
  HostAllocator& allocator_;
  const int64_t page_bytes_;
};

}  // namespace attend
