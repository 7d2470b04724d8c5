// SPDX-License-Identifier: Apache-2.0
//
// Page-locked host memory, which every GPU of the process copies at bus speed and whose kernels can
// access in place.

#pragma once

#include "kernels/contract/backend.h"
#include "kernels/cuda/runtime/pinned_ranges.h"

namespace attend::cuda {

class PinnedAllocator : public HostAllocator {
 public:
  // `device` is the one whose context the calls use. Memory that is page-locked at the same address
  // on the device (on Linux, all of it) is recorded in `pinned`, which must outlive this.
  PinnedAllocator(int device, PinnedRanges& pinned);

  // Uses huge pages where available: locking them takes a tenth of the time.
  Result<void*> Allocate(int64_t bytes) override;
  void Free(void* data, int64_t bytes) override;
  Status Register(void* data, int64_t bytes) override;
  void Unregister(void* data, int64_t bytes) override;

  // Whether page-locked memory has the same address on the device.
  bool same_address() const { return same_address_; }

 private:
  const int device_;
  const bool same_address_;
  PinnedRanges& pinned_;
};

}  // namespace attend::cuda
