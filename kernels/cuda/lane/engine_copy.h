// SPDX-License-Identifier: Apache-2.0
//
// Copies by the copy engines, contiguous or strided. Any thread whose current device is the
// memory's.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attend::cuda {

// `rows` runs of `width` bytes, `pitch` bytes from one to the next on both sides.
struct BoxCopy {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t width = 0;
  int64_t rows = 1;
  int64_t pitch = 0;
};

// The same within one memory.
struct ByteRuns {
  char* data = nullptr;
  int64_t width = 0;
  int64_t rows = 1;
  int64_t pitch = 0;
};

// Sets every byte of the runs, and none between them.
cudaError_t EnqueueFill(const ByteRuns& runs, int value, cudaStream_t stream);

// Enqueues the copy in pieces of at most kEngineCopyBytesMax, between which other streams' copies
// can run.
cudaError_t EnqueueCopy(const BoxCopy& copy, cudaMemcpyKind kind, cudaStream_t stream);

}  // namespace attend::cuda
