// SPDX-License-Identifier: Apache-2.0
//
// Starts the CUDA kernels. Host code; any thread whose current device is the tensors'. Nothing here
// allocates on the device or keeps state, or waits, but for one thing: without page-locked memory
// for it (LaunchOptions::lists) CUDA may wait for what stands before on the stream to copy a list
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

// One attention whose memory lies on the current device, and what is to compute it. `config` is an
// index into VariantsFor; kDefaultConfig is the best that the device can run.
struct LaunchItem {
  KernelId kernel = KernelId::kCudaFlashFp32;
  Attention attention;
  int config = kDefaultConfig;
};

// The compiled variants of a kernel that can compute `problem`, best first. They depend on the
// problem alone: the same bits come out wherever, and beside whatever, a problem is computed. Empty
// for kernels that have no variants or are not CUDA's.
std::span<const FlashVariant> VariantsFor(KernelId kernel, const Problem& problem);

// Bytes of workspace that LaunchBatch needs. Only the problems are looked at. 0 for no items.
Result<int64_t> BatchWorkspaceBytes(std::span<const LaunchItem> items);

// At most this much LaunchOptions::lists is taken by one launch of these problems, in any groups.
int64_t ListBytesMax(std::span<const LaunchItem> items);

// Enqueues all items, one launch for those that share a compiled variant. `workspace` is 256-byte
// aligned and its first kTileQueueBytes are zero, before and after; who shares it must be ordered
// by a stream. INVALID_ARGUMENT: too small a workspace, or a config that does not exist. INTERNAL:
// what CUDA says of a launch; some of the items may have been enqueued by then.
Status LaunchBatch(std::span<const LaunchItem> items, void* workspace, int64_t workspace_bytes,
                   cudaStream_t stream, const LaunchOptions& options = {});

// Brings the code of all kernels that it can run to the current device, so that the first request
// does not wait for it.
cudaError_t LoadKernels();

}  // namespace attend::cuda
