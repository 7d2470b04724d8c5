// SPDX-License-Identifier: Apache-2.0
//
// The backward pass on a GPU (contract/gradients.h): launches that leave dQ, dK, dV and, if asked
// for, dBias and dSinks. Items of any lengths, heads, strides and masks share launches if they
// agree in kernel, dtype, D, Dv, in which gradients are wanted, and in whether there are score
// terms and dropout. Every element of a gradient is summed in one order. So bits depend on the
// problem, on what is asked for and on room_for_turns, and on nothing else.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/contract/gradients.h"
#include "kernels/contract/select.h"
#include "kernels/util/status.h"

namespace attend::cuda {

// All memory is the device's, lengths and offsets too. `attention` and `gradients` passed Check.
struct BackwardItem {
  KernelId kernel = KernelId::kCudaFlashFp32;
  Attention attention;
  Gradients gradients;
  bool room_for_turns;  // false: a problem that TakesTurns does without, with other bits
};

// As WhyNotTma of an attention, of dO too.
std::string_view WhyNotTma(const Attention& attention, const Gradients& gradients);

// Bytes of workspace for one call with these items: what the largest needs, and up to 256 MiB so
// that more of them share a launch. Overflow is INVALID_ARGUMENT, and so are more tiles than the
// largest launch takes: of packed sequences, as many for each as the longest has.
Result<int64_t> BackwardWorkspaceBytes(std::span<const BackwardItem> items);

// Enqueues the launches; returns before they have run. `workspace`: 256-byte aligned, of
// BackwardWorkspaceBytes, or at least of what it is for each item alone: then fewer share a launch.
// Calls that share it must be ordered. Nothing is enqueued if an argument is bad; what CUDA refuses
// (INTERNAL) may leave some of it enqueued. Kernels that have no backward pass are UNIMPLEMENTED.
Status LaunchBackward(std::span<const BackwardItem> items, void* workspace, int64_t workspace_bytes,
                      cudaStream_t stream);

// Has the kernels' code on the current device, of this compute capability's major number, now, not
// at the first launch: loading may wait for all streams. Does nothing on GPUs newer than Hopper,
// where the driver compiles each kernel before it runs first: all would take minutes.
cudaError_t LoadBackward(int compute_major);

}  // namespace attend::cuda
