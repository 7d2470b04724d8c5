// SPDX-License-Identifier: Apache-2.0
//
// Bookkeeping between the splits of a segment, shared by all decoding kernels. Device code; all
// threads of a block call each function together.

#pragma once

#include "kernels/cuda/decode/merge.cuh"

namespace attend::cuda::decode {

// The group that the current split belongs to, and where its partials are stored.
struct OpenGroup {
  int number = -1;
  PartialRun run;
};
template <class Block>
__device__ __forceinline__ void Open(const DecodeParams& params, const Block& block, int split,
                                     OpenGroup& group) {
  if (split / kFanIn == group.number) return;
  group.number = split / kFanIn;
  group.run = GroupRun(params, block.walk.shares, block.segment, group.number);
}

// Merges if `split`, whose partial is stored, is the last of its group or of the segment.
template <class T, class Element, class Block>
__device__ __forceinline__ void AfterSplit(const DecodeParams& params, Block& block,
                                           const OpenGroup& group, int split) {
  const Segment& segment = block.segment;
  const int begin = group.number * kFanIn;
  const int end = begin + GroupSize(segment.splits, group.number);
  if (split + 1 != min(end, segment.split_end)) return;
  FinishSplits<T, Element>(params, block.walk.shares, segment, group.run, split,
                           split + 1 - max(begin, segment.split), block.exchange);
}

}  // namespace attend::cuda::decode
