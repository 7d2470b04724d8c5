// SPDX-License-Identifier: Apache-2.0
//
// CUDA's errors as Status. Pure; any thread.

#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kernels/util/status.h"

namespace attend::cuda {

// "cudaErrorIllegalAddress (an illegal memory access was encountered) in copy in".
std::string ErrorText(cudaError_t error, const std::string& where);

// INTERNAL with ErrorText; RESOURCE_EXHAUSTED if CUDA is out of memory. OK for cudaSuccess.
Status ToStatus(cudaError_t error, const std::string& where);

// Whether the device's context is lost: every later call of this process will fail too.
bool IsSticky(cudaError_t error);

}  // namespace attend::cuda
