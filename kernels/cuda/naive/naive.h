// SPDX-License-Identifier: Apache-2.0
//
// cuda_naive: standard attention, as naive.cu computes it.

#pragma once

#include <cuda_runtime_api.h>

#include "kernels/contract/problem.h"

namespace attend::cuda {

// `scores` holds batch * heads_q * len_q * len_k floats.
cudaError_t LaunchNaive(const Attention& attention, float* scores, cudaStream_t stream);

// Loads the code onto the current device.
cudaError_t LoadNaive();

}  // namespace attend::cuda
