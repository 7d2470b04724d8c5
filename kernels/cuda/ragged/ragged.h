// SPDX-License-Identifier: Apache-2.0
//
// The ragged launch: one kernel launch computes an array of attentions of any shapes, strides and
// masks. Its unit is the tile, a block of query rows of one head of one sequence. Thread blocks
// stay on the multiprocessors and claim tiles from one queue, longest first; what a tile computes
// depends on its attention alone, so no bit of an answer depends on its neighbours.
//
// Tiles are never listed one by one. Those of heads that agree in length form a TileGroup, and a
// tile's number is enough to find its group, head and rows.

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

// The head of every launch's workspace. All zero between launches: the last block to leave a
// launch clears it (in cuda_flash_sm80 the counter wraps), so no launch pays for clearing it first.
struct TileQueue {
  unsigned int next = 0;  // tiles claimed beyond each block's first
  unsigned int left = 0;  // blocks that have found no more work
};
// Room for the counters of decoding launches too (decode/decode.h).
inline constexpr int64_t kTileQueueBytes = 16384;

// Tiles of one launch, so that their numbers and the blocks' fit 31 bits. More rows than this many
// tiles hold are terabytes.
inline constexpr int64_t kLaunchTilesMax = int64_t{1} << 30;
inline constexpr int kTileRowsMin = 32;  // of any variant

// The kernel's parameter. One attention whose lengths the host knows travels in it; a list, or
// lengths that are on the device, are read from the workspace.
struct RaggedParams {
  TensorMaps single_maps;
  Attention single;           // of a list: only its page_rows, which is 0 in all or in none
  TileGroup single_group[2];  // the second only ends the first
  const TensorMaps* maps = nullptr;
  const Attention* attentions = nullptr;  // null: `single`
  const TileGroup* groups = nullptr;      // group_count, and one that ends the last
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
  int shared_bytes = 0;
  int blocks = 1;  // to a multiprocessor
  const void* kernel = nullptr;
  int columns = 0;            // of O, padded: of a variant of cuda_decode_sm80
  bool begins_early = false;  // waits by itself for what went before it on the stream
  bool tensor_maps = false;   // loads (and may store) through TensorMaps of these boxes
  TensorBoxes boxes;
};

// "rows128_keys64_threads256".
template <class T>
std::string TileName() {
  return "rows" + std::to_string(T::kRows) + "_keys" + std::to_string(T::kKeys) + "_threads" +
         std::to_string(T::kThreads);
}

// The variant of a kernel that computes tiles of T. `name` lives on.
template <class T>
FlashVariant MakeVariant(std::string_view name, const void* kernel, int shared_bytes) {
  static_assert(T::kRows >= kTileRowsMin);
  FlashVariant variant;
  variant.name = name;
  variant.rows = T::kRows;
  variant.keys = T::kKeys;
  variant.threads = T::kThreads;
  variant.shared_bytes = shared_bytes;
  variant.blocks = T::kBlocks;
  variant.kernel = kernel;
  return variant;
}

// Bytes of workspace for a launch of these attentions: kTileQueueBytes, and room for what does not
// travel in the parameter. Overflow and more than kLaunchTilesMax tiles are INVALID_ARGUMENT.
Result<int64_t> RaggedWorkspaceBytes(std::span<const Problem* const> problems);

// Enqueues one launch of `variant`. `workspace` is 256-byte aligned, has RaggedWorkspaceBytes
// bytes, and its queue is zero; launches that share it must be ordered. Returns before anything has
// run. Empty attentions are allowed. Of variants with maps: keys of all are in pages, or of none.
cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, cudaStream_t stream);

// Has the code of what a launch of a list needs beside the kernel on the current device now, not at
// the first one: loading may wait for all streams.
cudaError_t LoadRagged();
// The same for kernels.
cudaError_t LoadVariants(std::span<const FlashVariant> variants);

}  // namespace attend::cuda
