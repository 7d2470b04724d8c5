// SPDX-License-Identifier: Apache-2.0
//
// Several passes in one launch. They travel in the kernel's parameter, one after another; a block
// finds its own by its number, and what it computes depends on that pass alone.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ragged/ragged.h"

namespace attend::cuda {

// Most items of a launch. A kernel's parameters have at most 32764 bytes.
inline constexpr int kItemsMax = 16;
inline constexpr int kSharedBytesAlways = 48 << 10;  // more must be asked for
inline constexpr uint32_t kNoBlock = UINT32_MAX;

// blockIdx.x, opaque to the compiler: what follows from it is computed where it is needed, not kept
// in registers across the loop over tiles.
__device__ __forceinline__ uint32_t BlockIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// A kernel's parameter: items, each with its `pass`. Kernels are compiled for one item and for
// kItemsMax: of one, all that is read is an operand at a known place, which takes no register.
template <class Item, int kCount>
struct LaunchList {
  static_assert(sizeof(Item) * kItemsMax + 64 <= 32764);
  Item items[kCount];
  uint32_t blocks = 0;  // of the launch

  // The item that a block of the launch belongs to.
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

// An item, and how many blocks it has.
template <class Item>
struct ItemBlocks {
  Item item;
  int64_t blocks = 0;
};

struct LaunchShape {
  int threads = 0;
  int shared_bytes = 0;
  int64_t blocks_max = INT64_MAX;  // of blocks that loop
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
  const int64_t grid = std::min(blocks, shape.blocks_max);
  kernel<<<static_cast<unsigned>(grid), shape.threads, shape.shared_bytes, stream>>>(list);
  return cudaGetLastError();
}

// One launch for as many of the items as a launch can have. Items without blocks are left out. If
// none is left, nothing is launched, but the kernels' code is on the device after it.
// Without a kernel for several, each has a launch.
template <class Item>
cudaError_t LaunchItems(void (*single)(LaunchList<Item, 1>),
                        void (*several)(LaunchList<Item, kItemsMax>),
                        std::vector<ItemBlocks<Item>> items, const LaunchShape& shape,
                        cudaStream_t stream) {
  std::erase_if(items, [](const ItemBlocks<Item>& each) { return each.blocks == 0; });
  cudaError_t error = cudaSuccess;
  if (items.empty()) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(single));
    if (error != cudaSuccess || several == nullptr) return error;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(several));
  }
  const size_t most = several == nullptr ? 1 : kItemsMax;
  for (size_t begin = 0, end = 0; begin < items.size() && error == cudaSuccess; begin = end) {
    int64_t blocks = 0;
    for (; end < items.size() && end < begin + most; ++end) {
      if (end > begin && blocks + items[end].blocks > kLaunchTilesMax) break;
      blocks += items[end].blocks;
    }
    const auto chunk = std::span<const ItemBlocks<Item>>(items).subspan(begin, end - begin);
    error = chunk.size() == 1 ? LaunchChunk<Item, 1>(single, chunk, shape, stream)
                              : LaunchChunk<Item, kItemsMax>(several, chunk, shape, stream);
  }
  return error;
}

}  // namespace attend::cuda
