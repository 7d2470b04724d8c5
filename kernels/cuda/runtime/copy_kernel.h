// SPDX-License-Identifier: Apache-2.0
//
// Copies by multiprocessors instead of copy engines: many small ones in one launch, from or to
// page-locked host memory, which the device accesses over the bus. Host code; any thread whose
// current device is the memory's.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace attend::cuda {

// Device memory, or page-locked mapped memory. Pieces of one launch do not overlap. If the
// addresses differ modulo 16, `from` is read in aligned 16-byte units: up to 15 bytes around the
// piece are read too, and discarded.
struct CopyPiece {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t bytes = 0;
};

// Enqueues all copies, up to kCopyPiecesMax per launch. The list is passed in the kernel's
// parameter. INVALID_VALUE: an address is null or a size negative.
cudaError_t LaunchCopy(std::span<const CopyPiece> pieces, cudaStream_t stream);
inline constexpr int kCopyPiecesMax = 320;  // 64 items of 5 spans

// Loads the code on the current device.
cudaError_t LoadCopy();

}  // namespace attend::cuda
