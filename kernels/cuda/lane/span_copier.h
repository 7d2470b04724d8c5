// SPDX-License-Identifier: Apache-2.0
//
// Copies the spans of many small items in few calls, in one direction of one batch: gather or
// scatter. One thread.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/cuda/lane/lane_tuning.h"
#include "kernels/cuda/runtime/copy_kernel.h"
#include "kernels/cuda/runtime/pinned_ranges.h"

namespace attend::cuda {

// Whether a kernel can access the span: it is page-locked and mapped at the same address on the
// device. If `pinned` does not know it, CUDA is asked, which takes some hundred nanoseconds: for
// memory of another backend's allocator, and for memory that is not page-locked.
bool IsMapped(const PinnedRanges& pinned, const HostSpan& span);

class SpanCopier {
 public:
  // `pinned` must outlive it.
  SpanCopier(const PinnedRanges& pinned, const LaneTuning& tuning, cudaMemcpyKind kind)
      : pinned_(pinned), tuning_(tuning), kind_(kind) {}

  // Between the span and `device`; the direction is `kind`.
  void Add(const HostSpan& span, char* device, size_t item);
  // Adds a copy to the device from memory known to be mapped, by the copy kernel at any size.
  void AddMapped(const CopyPiece& piece, size_t item);

  // Enqueues the copies: one kernel launch, and one call per engine copy. A failed launch's copies
  // are retried one by one on the engines; `fail` is called for each item whose copy fails there.
  using Fail = std::function<void(size_t item, cudaError_t error)>;
  void Enqueue(cudaStream_t stream, const Fail& fail);

 private:
  bool EnqueueTogether(cudaStream_t stream);

  const PinnedRanges& pinned_;
  const LaneTuning& tuning_;
  const cudaMemcpyKind kind_;
  std::vector<CopyPiece> gathered_;
  std::vector<size_t> gathered_items_;
  std::vector<CopyPiece> engine_;
  std::vector<size_t> engine_items_;
};

}  // namespace attend::cuda
