// SPDX-License-Identifier: Apache-2.0
//
// How a thread block of a ragged launch finds work: claims a tile number, then finds the tile's
// attention, head and rows. Device code; tile_order.h has the order of tiles.

#pragma once

#include <cstdint>

#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/ragged/tile_order.h"

namespace attend::cuda {

// Claims the block's next tile; one thread. A block's first tile is its own number, later ones come
// from the queue.
__device__ __forceinline__ int ClaimTile(const RaggedParams& params) {
  return static_cast<int>(atomicAdd(&params.queue->next, 1u) + gridDim.x);
}

// Tiles of the launch.
__device__ __forceinline__ int TileCount(const RaggedParams& params) {
  return params.attentions == nullptr ? params.single_group[1].first_tile
                                      : params.groups[params.group_count].first_tile;
}

// ClaimTile for kernels whose blocks claim exactly one tile after each tile they have, and stop at
// the first that does not exist. There are then tile_count claims: one per tile beyond the blocks'
// first, and one failed claim per block. The last wraps the counter from tile_count - 1 to zero, so
// such a kernel does not call LeaveQueue.
__device__ __forceinline__ int ClaimTileOf(const RaggedParams& params, int tile_count) {
  if (tile_count <= static_cast<int>(gridDim.x)) return tile_count;  // all are first tiles
  return static_cast<int>(atomicInc(&params.queue->next, tile_count - 1) + gridDim.x);
}

// Call once per block, by one thread, after its last claim. The last block resets the queue.
__device__ __forceinline__ void LeaveQueue(const RaggedParams& params) {
  __threadfence();
  if (atomicAdd(&params.queue->left, 1u) + 1 < gridDim.x) return;
  params.queue->next = 0;
  params.queue->left = 0;
}

// The group of a tile in a list: the last that begins at or before it.
__device__ __forceinline__ int FindGroup(const RaggedParams& params, int tile) {
  int low = 0;
  for (int high = params.group_count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (params.groups[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// False: there is no such tile, the block is done. kSingle: params.attentions is null.
template <bool kSingle>
__device__ __forceinline__ bool FindTile(const RaggedParams& params, int tile, int rows,
                                         TileWork& work) {
  if constexpr (kSingle) {
    if (tile >= params.single_group[1].first_tile) return false;
    work.attention = &params.single;
    PlaceTile(params.single_group[0], params.single.problem.heads_q, tile, rows, work);
  } else {
    if (tile >= params.groups[params.group_count].first_tile) return false;
    const TileGroup& group = params.groups[FindGroup(params, tile)];
    work.attention = params.attentions + group.problem;
    PlaceTile(group, params.attentions[group.problem].problem.heads_q, tile, rows, work);
  }
  return true;
}

__device__ __forceinline__ bool FindTile(const RaggedParams& params, int tile, int rows,
                                         TileWork& work) {
  return params.attentions == nullptr ? FindTile<true>(params, tile, rows, work)
                                      : FindTile<false>(params, tile, rows, work);
}

}  // namespace attend::cuda
