// SPDX-License-Identifier: Apache-2.0
//
// How a block of a decoding launch finds its share of the work, and the segments in it, each of
// which is splits of one unit. Device code.

#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/decode/tile.cuh"

namespace attend::cuda::decode {

// A block's position in the line of splits. In shared memory; one thread advances it.
template <class T>
struct Walk {
  Shares shares;
  int64_t end;        // of the block's share
  int64_t position;   // of the next split, at or after the share's beginning
  int64_t begin;      // of the sequence's first split
  int32_t sequence;   // its index in the launch
  SequencePlan plan;  // of that sequence
  // The kernel's parameter: reading a place of that that is not known before takes as long as
  // reading memory.
  Attention single;
  // If sequences differ: cost before the sequences that each thread has summed.
  int64_t begins[T::kBlockThreads];
};

__device__ __forceinline__ SequenceId IdOf(const DecodeParams& params, int sequence) {
  if (params.sequences == nullptr) return {0, sequence};
  return params.sequences[sequence];
}
template <class T>
__device__ __forceinline__ const Attention& AttentionOf(const DecodeParams& params,
                                                        const Walk<T>& walk, const SequenceId& id) {
  return params.attentions == nullptr ? walk.single : params.attentions[id.problem];
}
template <class T>
__device__ __forceinline__ SequencePlan PlanOf(const DecodeParams& params, const Walk<T>& walk,
                                               int sequence) {
  const SequenceId id = IdOf(params, sequence);
  return PlanSequence(AttentionOf(params, walk, id), id.b, T::kRows);
}

// Sum of `value` over the threads before this one, and over all.
template <int kThreads>
__device__ __forceinline__ int64_t SumBefore(int64_t value, int64_t& all) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t left = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int64_t before = sum - value;
  all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  return before;
}

// All threads together.
template <int kThreads, class Words>
__device__ __forceinline__ void CopyWords(const Words& from, Words& to) {
  static_assert(sizeof(Words) % 4 == 0);
  for (int n = threadIdx.x; n < static_cast<int>(sizeof(Words) / 4); n += kThreads) {
    reinterpret_cast<uint32_t*>(&to)[n] = reinterpret_cast<const uint32_t*>(&from)[n];
  }
}

template <class T>
__device__ __forceinline__ int SequencesEach(const DecodeParams& params) {
  return (params.sequence_count + T::kBlockThreads - 1) / T::kBlockThreads;
}

// Determines how the launch is cut. All threads; `walk` may be read after the next barrier.
template <class T>
__device__ __forceinline__ void StartWalk(const DecodeParams& params, Walk<T>& walk,
                                          Segment& segment) {
  const int thread = threadIdx.x;
  CopyWords<T::kBlockThreads>(params.single, walk.single);
  if (params.alike) {
    CopyWords<T::kBlockThreads>(params.shares, walk.shares);
    CopyWords<T::kBlockThreads>(params.segment, segment);
    return;
  }
  __syncthreads();
  const int each = SequencesEach<T>(params);
  const int first = min(thread * each, params.sequence_count);
  const int last = min(first + each, params.sequence_count);
  int64_t mine = 0;
#pragma unroll 1
  for (int n = first; n < last; ++n) mine += PlanOf<T>(params, walk, n).cost();
  int64_t all;
  walk.begins[thread] = SumBefore<T::kBlockThreads>(mine, all);
  if (thread == 0) walk.shares = CutShares(all, static_cast<int>(gridDim.x));
}

// Advances to the sequence in which the block's share begins. One thread.
template <class T>
__device__ __forceinline__ void EnterShare(const DecodeParams& params, Walk<T>& walk) {
  const auto share = static_cast<int>(blockIdx.x);
  walk.position = walk.shares.Begin(share);
  walk.end = walk.shares.End(share);
  walk.sequence = params.sequence_count;
  if (params.alike || walk.position >= walk.end) return;
  int low = 0;  // the last thread whose sequences begin at or before the position
  for (int high = T::kBlockThreads; high - low > 1;) {
    const int middle = (low + high) / 2;
    (walk.begins[middle] <= walk.position ? low : high) = middle;
  }
  walk.sequence = low * SequencesEach<T>(params);
  walk.begin = walk.begins[low];
}

// Address of the keys or values of one KV head.
__device__ __forceinline__ const char* DataOf(const Attention& a, const ConstTensorView& view,
                                              const Sequence& s, int b, int h) {
  const int64_t first = a.problem.page_rows > 0 ? 0 : b * view.stride_b + s.k_row * view.stride_l;
  return static_cast<const char*>(view.data) + 2 * (h * view.stride_h + first);
}

// Sets the per-unit fields.
__device__ __forceinline__ void PlaceUnit(const Attention& a, int b, int h, Segment& segment) {
  const Sequence& s = segment.sequence;
  segment.attention = &a;
  segment.b = b;
  segment.h = h;
  segment.q = static_cast<const char*>(a.q.data) + 2 * (b * a.q.stride_b + s.q_row * a.q.stride_l);
  segment.k.data = DataOf(a, a.k, s, b, h);
  segment.v.data = DataOf(a, a.v, s, b, h);
  segment.pages = a.problem.page_rows > 0 ? a.kv_pages.pages + b * a.kv_pages.stride : nullptr;
  segment.hidden_begin = INT_MAX;
  segment.hidden_end = 0;
}

// The share's next segment if all sequences are alike; one thread. Others wait for it, so it avoids
// divisions.
template <class T>
__device__ __forceinline__ void NextAlike(const DecodeParams& params, Walk<T>& walk,
                                          Segment& segment) {
  segment.attention = nullptr;
  const SequencePlan& plan = params.plan;
  const auto end = static_cast<int>(walk.end);
  const auto position = static_cast<int>(walk.position);
  if (position >= end) return;
  const auto unit_cost = static_cast<int>(plan.unit_cost());
  int unit = params.by_unit_cost.Of(position);  // over all sequences
  int begin = unit * unit_cost;
  int split = params.by_split_cost.Of(position - begin + plan.split_cost - 1);
  if (split == plan.splits) {
    split = 0;
    ++unit;
    begin += unit_cost;
  }
  if (begin + split * plan.split_cost >= end) return;  // no split begins in the share
  segment.position = begin;
  segment.split = split;
  segment.split_end = min(params.by_split_cost.Of(end - begin + plan.split_cost - 1), plan.splits);
  walk.position = begin + segment.split_end * plan.split_cost;
  const int b = params.by_units.Of(unit);
  unit -= b * plan.units;
  const int h = params.by_row_tiles.Of(unit);
  if (plan.row_tiles > 1) {
    SetRowsAndKeys(walk.single.problem.mask, (unit - h * plan.row_tiles) * T::kRows, T::kRows,
                   segment);
  }
  PlaceUnit(walk.single, b, h, segment);
}

// The share's next segment; one thread. Its attention is null if there is none.
template <class T>
__device__ __forceinline__ void NextSegment(const DecodeParams& params, Walk<T>& walk,
                                            Segment& segment) {
  if (params.alike) {
    NextAlike<T>(params, walk, segment);
    return;
  }
  segment.attention = nullptr;
  int64_t split;  // within the sequence, over its units
#pragma unroll 1
  for (;; ++walk.sequence) {
    if (walk.sequence >= params.sequence_count || walk.position >= walk.end) return;
    walk.plan = PlanOf<T>(params, walk, walk.sequence);
    split = CeilDivide(walk.position - walk.begin, walk.plan.split_cost);
    if (split < int64_t{walk.plan.units} * walk.plan.splits) break;
    walk.begin += walk.plan.cost();
    walk.position = max(walk.position, walk.begin);
  }
  const SequencePlan& plan = walk.plan;
  const auto unit = static_cast<int>(FastDivide(split, plan.splits));
  segment.position = walk.begin + unit * plan.unit_cost();
  segment.split = static_cast<int>(split - int64_t{unit} * plan.splits);
  const int64_t left = walk.end - segment.position;
  segment.split_end =
      left <= 0 ? 0 : static_cast<int>(Least(CeilDivide(left, plan.split_cost), plan.splits));
  walk.position = segment.position + int64_t{segment.split_end} * plan.split_cost;
  if (segment.split >= segment.split_end) {  // the share ends inside a split of an earlier one
    walk.position = walk.end;
    return;
  }
  const SequenceId id = IdOf(params, walk.sequence);
  const Attention& a = AttentionOf(params, walk, id);
  const int h = plan.row_tiles == 1 ? unit : unit / plan.row_tiles;
  DescribeSequence(a, plan, segment);
  SetRowsAndKeys(a.problem.mask, (unit - h * plan.row_tiles) * T::kRows, T::kRows, segment);
  PlaceUnit(a, id.b, h, segment);
}

}  // namespace attend::cuda::decode
