// SPDX-License-Identifier: Apache-2.0
//
// The ragged launch: one kernel launch computes an array of attentions of any shapes, strides and
// masks. Its unit is the tile, a block of query rows of one head of one sequence. Thread blocks are
// persistent and claim tiles from one queue, longest first; a tile's result is a function of its
// attention alone, so no bit depends on its neighbours.
//
// Tiles are never listed individually. Heads of equal length form a TileGroup, and a tile's number
// determines its group, head and rows.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "kernels/cuda/ragged/tile_order.h"
#include "kernels/util/status.h"

namespace attend::cuda {

// The head of every launch's workspace. All zero between launches: the last block to leave a launch
// clears it (in cuda_flash_sm80 the counter wraps), so no launch pays for clearing.
struct TileQueue {
  unsigned int next = 0;  // tiles claimed beyond each block's first
  unsigned int left = 0;  // blocks that found no more work
};
// Includes the counters of decoding launches (decode/decode.h).
inline constexpr int64_t kTileQueueBytes = 16384;

// Tiles of one launch, so that tile and block numbers fit 31 bits. More rows than this many tiles
// hold would take terabytes.
inline constexpr int64_t kLaunchTilesMax = int64_t{1} << 30;
inline constexpr int kTileRowsMin = 32;  // lower bound over all variants

// Kernel parameter. A single attention whose lengths the host knows is passed by value; a list, or
// lengths in device memory, are read from the workspace.
struct RaggedParams {
  TensorMaps single_maps;
  Attention single;           // for a list: only its page_rows, which is 0 for all or for none
  TileGroup single_group[2];  // the second is the end sentinel
  const TensorMaps* maps = nullptr;
  const Attention* attentions = nullptr;  // null: `single`
  const TileGroup* groups = nullptr;      // group_count entries and an end sentinel
  int32_t group_count = 1;
  TileQueue* queue = nullptr;
};

// A compiled kernel. Its blocks take RaggedParams as __grid_constant__ and claim tiles
// (tile_queue.cuh) of `rows` query rows.
struct FlashVariant {
  std::string_view name;  // "rows128_keys64_threads256": the tile of one block
  int rows = 0;
  int keys = 0;
  int threads = 0;
  int shared_bytes = 0;  // of a launch
  int block_bytes = 0;   // of shared memory: these and the kernel's own
  int blocks = 1;        // per multiprocessor
  const void* kernel = nullptr;
  int columns = 0;            // of O, padded: variants of cuda_decode_sm80 only
  bool begins_early = false;  // waits for earlier work on the stream itself
  bool tensor_maps = false;   // loads (and may store) through TensorMaps with these boxes
  TensorBoxes boxes;
};

// "rows128_keys64_threads256".
template <class T>
std::string TileName() {
  return "rows" + std::to_string(T::kRows) + "_keys" + std::to_string(T::kKeys) + "_threads" +
         std::to_string(T::kThreads);
}

// The variant of a kernel that computes tiles of T. `name` must have static storage; `own_bytes`:
// the kernel's own shared memory.
template <class T>
FlashVariant MakeVariant(std::string_view name, const void* kernel, int shared_bytes,
                         int own_bytes = 0) {
  static_assert(T::kRows >= kTileRowsMin);
  FlashVariant variant;
  variant.name = name;
  variant.rows = T::kRows;
  variant.keys = T::kKeys;
  variant.threads = T::kThreads;
  variant.shared_bytes = shared_bytes;
  variant.block_bytes = shared_bytes + own_bytes;
  variant.blocks = T::kBlocks;
  variant.kernel = kernel;
  return variant;
}

// Workspace bytes for a launch of these attentions: kTileQueueBytes, plus what does not fit the
// parameter. INVALID_ARGUMENT on overflow or more than kLaunchTilesMax tiles.
Result<int64_t> RaggedWorkspaceBytes(std::span<const Problem* const> problems);

// Enqueues one launch of `variant`, asynchronously. `workspace` is 256-byte aligned, has
// RaggedWorkspaceBytes bytes, and its queue is zero; launches that share it must be ordered. Empty
// attentions are allowed. For variants with maps, keys must be paged in all attentions or in none.
cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, cudaStream_t stream);

// Loads, now, the code that a launch of a list needs beside the kernel itself on the current
// device: lazy loading may wait for all streams.
cudaError_t LoadRagged();
// The same for kernels.
cudaError_t LoadVariants(std::span<const FlashVariant> variants);

}  // namespace attend::cuda
