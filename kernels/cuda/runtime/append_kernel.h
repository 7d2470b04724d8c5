// SPDX-License-Identifier: Apache-2.0
//
// New rows of K and V go to their pages, those of many items in one launch. Host code; any thread
// whose current device is the memory's.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

// An item of a batch on the device: `attention`'s K and V are in pages, and its lengths count
// `append`'s rows already. The rows are in the device's memory, or page-locked.
struct AppendItem {
  Attention attention;
  KeyAppend append;
};

// Enqueues the writing of all items' rows. The items are passed as the kernel's parameter, some at
// a time.
cudaError_t LaunchAppend(std::span<const AppendItem> items, cudaStream_t stream);

// Loads the code onto the current device.
cudaError_t LoadAppend();

}  // namespace attend::cuda
