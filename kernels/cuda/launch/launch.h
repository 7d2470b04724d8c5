// SPDX-License-Identifier: Apache-2.0
//
// Launches the CUDA kernels. Host code; any thread whose current device is the tensors'. Stateless;
// allocates nothing on the device. Nothing waits, with one exception: without page-locked memory
// (LaunchOptions::lists), CUDA may wait for earlier work on the stream before it copies a list
// (ragged.h) of more than 64 KiB, some 64 attentions.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/ragged/launch_options.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

inline constexpr int kDefaultConfig = -1;

// One attention whose memory is on the current device, and the kernel to compute it. `config` is an
// index into VariantsFor; kDefaultConfig is the best that the device can run.
struct LaunchItem {
  KernelId kernel = KernelId::kCudaFlashFp32;
  Attention attention;
  int config = kDefaultConfig;
};

// The compiled variants of a kernel that can compute `problem`, best first; the first that fits a
// device's shared memory runs. A function of the problem alone, so that bits are the same under any
// load, and on every device with as much. Empty for kernels without variants and for those that are
// not CUDA's.
std::span<const FlashVariant> VariantsFor(KernelId kernel, const Problem& problem);

// Workspace bytes of LaunchBatch: depend on the problems, and on whether kernels can read Q, K and
// V in place (repack.h). 0 for no items.
Result<int64_t> BatchWorkspaceBytes(std::span<const LaunchItem> items);

// Upper bound of LaunchOptions::lists that one launch of these problems takes, however they are
// grouped.
int64_t ListBytesMax(std::span<const LaunchItem> items);

// Enqueues all items, in one launch per compiled variant (two for a variant with tensor maps, if
// some items' keys are paged and others' are not). `workspace` is 256-byte aligned and its first
// kTileQueueBytes are zero, before and after; launches that share it must be ordered by a stream.
// INVALID_ARGUMENT: workspace too small, no such config, or dropout whose rows the kernel cannot
// compute. UNIMPLEMENTED: a config that does not fit the device. INTERNAL: CUDA's error for a
// launch; some items may already be enqueued.
Status LaunchBatch(std::span<const LaunchItem> items, void* workspace, int64_t workspace_bytes,
                   cudaStream_t stream, const LaunchOptions& options = {});

// Loads the code of all kernels that the current device can run, so that the first request does not
// wait for it.
cudaError_t LoadKernels();

}  // namespace attend::cuda
