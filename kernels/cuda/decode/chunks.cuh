// SPDX-License-Identifier: Apache-2.0
//
// What happens between a segment's chunks, however they are computed. Device code; all threads of a
// block call each function together.

#pragma once

#include "kernels/cuda/decode/merge.cuh"

namespace attend::cuda::decode {

// The group that a chunk belongs to, and where its answers go; kept up from chunk to chunk.
struct OpenGroup {
  int number = -1;
  SlotRun run;
};
template <class Block>
__device__ __forceinline__ void Open(const DecodeParams& params, const Block& block, int chunk,
                                     OpenGroup& group) {
  if (chunk / kFanIn == group.number) return;
  group.number = chunk / kFanIn;
  group.run = GroupRun(params, block.walk.pieces, block.segment, group.number);
}

// Merges if `chunk`, whose answer is stored, is the last of its group or of the segment.
template <class T, class Element, class Block>
__device__ __forceinline__ void AfterChunk(const DecodeParams& params, Block& block,
                                           const OpenGroup& group, int chunk) {
  const Segment& segment = block.segment;
  const int begin = group.number * kFanIn;
  const int end = begin + GroupSize(segment.chunks, group.number);
  if (chunk + 1 != min(end, segment.chunk_end)) return;
  FinishChunks<T, Element>(params, block.walk.pieces, segment, group.run, chunk,
                           chunk + 1 - max(begin, segment.chunk), block.exchange);
}

}  // namespace attend::cuda::decode
