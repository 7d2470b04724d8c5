// SPDX-License-Identifier: Apache-2.0
//
// Where the items of a batch lie in a lane's device memory, and the same attention with its
// pointers moved there. Pure arithmetic on addresses: nothing is dereferenced, no GPU is needed.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/launch.h"

namespace attend::cuda {

inline constexpr int64_t kLayoutAlignment = 256;

// Offsets in bytes from the lane's memory, which is aligned to kLayoutAlignment.
struct ItemLayout {
  int64_t input = 0;
  int64_t output = 0;
};
struct BatchLayout {
  std::vector<ItemLayout> items;
  int64_t workspace = 0;  // always first, as it begins with the tile queue, which must stay zero
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;  // of everything
};

// Every span keeps its address modulo kLayoutAlignment, so that whatever is aligned on the host is
// aligned on the device. The workspace is LaunchBatch's. RESOURCE_EXHAUSTED if a kernel wants more
// than `workspace_bytes_max`, INVALID_ARGUMENT for negative sizes or a total that overflows 64
// bits.
Result<BatchLayout> LayOut(std::span<const WorkItem> items, int64_t workspace_bytes_max);

// How an item is started, its memory still where the item has it.
LaunchItem ToLaunch(const WorkItem& item);

// `item`'s attention with inputs moved from its host span to `input`, outputs to `output`.
// INVALID_ARGUMENT names a tensor that does not begin inside its span.
Result<Attention> Rebase(const WorkItem& item, void* input, void* output);

// Whether kernels overwrite every byte of the output span: then nothing of what lay there before
// can come back with the answer.
bool OutputIsDense(const WorkItem& item);

}  // namespace attend::cuda
