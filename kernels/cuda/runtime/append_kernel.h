// SPDX-License-Identifier: Apache-2.0
//
// Writes new rows of K and V to their pages, for many items in one launch. Host code; any thread
// whose current device is the memory's.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

// A batch's item on the device: `attention` has paged K and V, and its lengths already count
// `append`'s rows. The rows are in device memory, or page-locked.
struct AppendItem {
  Attention attention;
  KeyAppend append;
};

// Enqueues the writes of all items' rows. Items are passed in the kernel's parameter, some per
// launch.
cudaError_t LaunchAppend(std::span<const AppendItem> items, cudaStream_t stream);

// Loads the code on the current device.
cudaError_t LoadAppend();

}  // namespace attend::cuda
