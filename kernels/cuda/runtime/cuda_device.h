// SPDX-License-Identifier: Apache-2.0
//
// The properties of a GPU, read once at start. Any thread.

#pragma once

#include <cuda_runtime_api.h>

#include "kernels/contract/backend.h"

namespace attend::cuda {

// The oldest architecture that this build has machine code for: Ampere.
inline constexpr int kComputeCapabilityMin = 80;

// NOT_FOUND if there is no such GPU, UNIMPLEMENTED if it is too old, INTERNAL with CUDA's message
// if it cannot be used.
Result<DeviceInfo> ReadDeviceInfo(int index, const BackendOptions& options);

// Upper bound of a block's shared memory on the current device.
cudaError_t ReadBlockBytesMax(int* bytes);

}  // namespace attend::cuda
