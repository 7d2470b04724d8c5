// SPDX-License-Identifier: Apache-2.0
//
// Allocates the memory of shared regions: a sealed memfd whose pages are all present and
// page-locked by the backend, so that neither truncation by a client nor lack of memory can make
// the server's own reads fail.

#pragma once

#include <cstdint>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

// A region's memory in this process, and the file by which another process maps it.
struct RegionMapping {
  UniqueFd file;
  void* data = nullptr;  // page-aligned
  int64_t bytes = 0;
};

// The effect of unmapping a region here on its pages, which other processes may have mapped.
enum class Pages {
  kFreed,  // other mappings read zeros from then on
  kKept,   // contents stay as long as another process has the file or a mapping
};

// Thread-safe. Calls may take long, for page-locking or device synchronisation.
class RegionMemory {
 public:
  virtual ~RegionMemory() = default;
  // `bytes` must be a multiple of page_bytes(). RESOURCE_EXHAUSTED: not enough memory.
  virtual Result<RegionMapping> Map(int64_t bytes) = 0;
  // The memory must no longer be in use in this process.
  virtual void Unlock(void* data, int64_t bytes) = 0;
  // After Unlock. Mappings of other processes remain.
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
