// SPDX-License-Identifier: Apache-2.0
//
// Several passes in one launch. They are passed in the kernel's parameter; a block finds its own by
// its number, and its result is a function of that pass alone.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

// Upper bound of items per launch: kernel parameters have at most 32764 bytes.
inline constexpr int kItemsMax = 16;
inline constexpr int kSharedBytesAlways = 48 << 10;  // more must be requested
inline constexpr uint32_t kNoBlock = UINT32_MAX;

// blockIdx.x, opaque to the compiler, so that values derived from it are recomputed where needed
// instead of occupying registers across the loop over tiles.
__device__ __forceinline__ uint32_t BlockIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Kernel parameter: items, each with its `pass`. Kernels are compiled for one item and for
// kItemsMax: with one item, parameters are operands at fixed addresses, which take no registers.
template <class Item, int kCount>
struct LaunchList {
  static_assert(sizeof(Item) * kItemsMax + 64 <= 32764);
  static constexpr int kItems = kCount;
  Item items[kCount];
  uint32_t blocks = 0;  // of the launch

  // Index of the item that a block of the launch belongs to.
  __device__ __forceinline__ int Index(uint32_t block) const {
    int index = 0;
#pragma unroll
    for (int n = 1; n < kCount; ++n) index += items[n].pass.first_block <= block ? 1 : 0;
    return index;
  }
  __device__ __forceinline__ const Item& Of(uint32_t block) const { return items[Index(block)]; }
};

struct PassItem {
  BackwardPass pass;
};

// An item and its number of blocks.
template <class Item>
struct ItemBlocks {
  Item item;
  int64_t blocks = 0;
};

struct LaunchShape {
  int threads = 0;
  int shared_bytes = 0;
  int64_t blocks_max = INT64_MAX;  // upper bound for kernels whose blocks loop
  int cluster = 1;                 // blocks that read each other's shared memory
};

template <class Item, int kCount>
cudaError_t LaunchChunk(void (*kernel)(LaunchList<Item, kCount>),
                        std::span<const ItemBlocks<Item>> chunk, const LaunchShape& shape,
                        cudaStream_t stream) {
  LaunchList<Item, kCount> list;
  int64_t blocks = 0;
  for (int n = 0; n < kCount; ++n) {
    const bool exists = n < static_cast<int>(chunk.size());
    if (exists) list.items[n] = chunk[n].item;
    list.items[n].pass.first_block = exists ? static_cast<uint32_t>(blocks) : kNoBlock;
    if (exists) blocks += chunk[n].blocks;
    if (blocks > kLaunchTilesMax) return cudaErrorInvalidConfiguration;
  }
  list.blocks = static_cast<uint32_t>(blocks);
  if (shape.shared_bytes > kSharedBytesAlways) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  const int64_t clusters = (std::min(blocks, shape.blocks_max) + shape.cluster - 1) / shape.cluster;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * shape.cluster));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, list);
}

// One launch for as many items as fit. Items without blocks are skipped; if all are, nothing is
// launched, but the kernels' code is loaded. If `several` is null, each item has a launch; if
// `single` is, `several` takes one too.
template <class Item>
cudaError_t LaunchItems(void (*single)(LaunchList<Item, 1>),
                        void (*several)(LaunchList<Item, kItemsMax>),
                        std::vector<ItemBlocks<Item>> items, const LaunchShape& shape,
                        cudaStream_t stream) {
  std::erase_if(items, [](const ItemBlocks<Item>& each) { return each.blocks == 0; });
  cudaError_t error = cudaSuccess;
  if (items.empty()) {
    cudaFuncAttributes attributes;
    for (const void* kernel :
         {reinterpret_cast<const void*>(single), reinterpret_cast<const void*>(several)}) {
      if (kernel == nullptr || error != cudaSuccess) continue;
      error = cudaFuncGetAttributes(&attributes, kernel);
    }
    return error;
  }
  const size_t most = several == nullptr ? 1 : kItemsMax;
  for (size_t begin = 0, end = 0; begin < items.size() && error == cudaSuccess; begin = end) {
    int64_t blocks = 0;
    for (; end < items.size() && end < begin + most; ++end) {
      if (end > begin && blocks + items[end].blocks > kLaunchTilesMax) break;
      blocks += items[end].blocks;
    }
    const auto chunk = std::span<const ItemBlocks<Item>>(items).subspan(begin, end - begin);
    error = chunk.size() == 1 && single != nullptr
                ? LaunchChunk<Item, 1>(single, chunk, shape, stream)
                : LaunchChunk<Item, kItemsMax>(several, chunk, shape, stream);
  }
  return error;
}

}  // namespace attend::cuda
