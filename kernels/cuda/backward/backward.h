// SPDX-License-Identifier: Apache-2.0
//
// The backward pass on a GPU (contract/gradients.h): launches that compute dQ, dK, dV and, on
// request, dBias and dSinks. Items of any lengths, heads, strides and masks share launches if they
// agree in kernel, dtype, D, Dv, the set of wanted gradients, and whether there are score terms and
// dropout. Every element of a gradient is summed in a fixed order, so its bits are a function of
// the problem, the wanted gradients, room_for_turns and the device's shared memory alone.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/contract/gradients.h"
#include "kernels/contract/select.h"
#include "kernels/util/status.h"

namespace attend::cuda {

// All memory is the device's, including lengths and offsets. `attention` and `gradients` have
// passed Check.
struct BackwardItem {
  KernelId kernel = KernelId::kCudaFlashFp32;
  Attention attention;
  Gradients gradients;
  bool room_for_turns;      // false: computes without turns, with different bits
  int block_bytes_max = 0;  // of shared memory: decides the tiles; 0: the device's
};

// WhyNotTma for an attention and its dO.
std::string_view WhyNotTma(const Attention& attention, const Gradients& gradients);

// Workspace bytes for one call with these items: the largest item's, and up to 256 MiB so that more
// of them share a launch. INVALID_ARGUMENT on overflow or more tiles than the largest launch takes;
// each packed sequence counts as the longest.
Result<int64_t> BackwardWorkspaceBytes(std::span<const BackwardItem> items);

// Enqueues the launches and returns before they have run. `workspace`: 256-byte aligned, of
// BackwardWorkspaceBytes, or at least the largest that is for any item alone: then fewer share a
// launch. Calls that share it must be ordered. Nothing is enqueued if an argument is invalid; after
// a CUDA error (INTERNAL) some launches may be. UNIMPLEMENTED for kernels without a backward pass.
Status LaunchBackward(std::span<const BackwardItem> items, void* workspace, int64_t workspace_bytes,
                      cudaStream_t stream);

// Loads, now, the kernels' code on the current device, of this major compute capability: lazy
// loading may wait for all streams. Does nothing on GPUs newer than Hopper, where the driver
// JIT-compiles each kernel: all of them would take minutes.
cudaError_t LoadBackward(int compute_major);

}  // namespace attend::cuda
