// SPDX-License-Identifier: Apache-2.0
//
// Starts the CUDA kernels. Host code; any thread whose current device is the tensors'. Nothing here
// waits, allocates or keeps state.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/problem.h"
#include "kernels/select.h"

namespace attend::cuda {

inline constexpr int kDefaultConfig = -1;

// Enqueues `kernel` for one attention whose memory lies on the current device. `workspace` has
// Selection::workspace_bytes bytes, 256-byte aligned. `config` picks a compiled variant of the
// kernel by index (FlashVariantsFor), kDefaultConfig the best that the device can run. Returns what
// CUDA says of the launch; a config that does not exist is cudaErrorInvalidValue, a kernel that is
// not CUDA's cudaErrorInvalidDeviceFunction.
cudaError_t Launch(KernelId kernel, const Attention& attention, void* workspace, int config,
                   cudaStream_t stream);

cudaError_t LaunchFlashFp32(const Attention& attention, int config, cudaStream_t stream);

// `scores` holds batch * heads_q * len_q * len_k floats.
cudaError_t LaunchNaive(const Attention& attention, float* scores, cudaStream_t stream);

// Brings the code of all kernels that it can run to the current device, so that the first request
// does not wait for it.
cudaError_t LoadKernels();
cudaError_t LoadFlashFp32();
cudaError_t LoadNaive();

// Grids are one-dimensional; work beyond CUDA's limit of blocks is split over several launches.
inline constexpr int64_t kGridBlocksMax = INT32_MAX;

}  // namespace attend::cuda
