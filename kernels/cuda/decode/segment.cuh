// SPDX-License-Identifier: Apache-2.0
//
// How a block of a decoding launch finds its piece of the work, and what each segment of it is: the
// chunks of one unit. Device code.

#pragma once

#include <cstdint>

#include "kernels/cuda/decode/tile.cuh"

namespace attend::cuda::decode {

// Where a block stands in the row of chunks. In shared memory; one thread moves it on.
template <class T>
struct Walk {
  Pieces pieces;
  int32_t piece;      // the block's
  int32_t next;       // the one after it
  int64_t end;        // of the piece
  int64_t position;   // of the next chunk, at or after the piece's begin
  int64_t begin;      // of the sequence's first chunk
  int32_t sequence;   // its number in the launch
  SequencePlan plan;  // of that sequence
  // Of sequences that differ: where those begin that each thread has added up.
  int64_t begins[T::kThreads];
};

__device__ __forceinline__ SequenceId IdOf(const DecodeParams& params, int sequence) {
  if (params.sequences == nullptr) return {0, sequence};
  return params.sequences[sequence];
}
__device__ __forceinline__ const Attention& AttentionOf(const DecodeParams& params,
                                                        const SequenceId& id) {
  return params.attentions == nullptr ? params.single : params.attentions[id.problem];
}
template <class T>
__device__ __forceinline__ SequencePlan PlanOf(const DecodeParams& params, int sequence) {
  const SequenceId id = IdOf(params, sequence);
  return PlanSequence(AttentionOf(params, id), id.b, T::kRows);
}

// The sum of `value` over the threads before this one, and over all.
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

template <class T>
__device__ __forceinline__ int SequencesEach(const DecodeParams& params) {
  return (params.sequence_count + T::kThreads - 1) / T::kThreads;
}

// Finds out how the launch is cut. All threads; `walk` may be read after the next barrier.
template <class T>
__device__ __forceinline__ void StartWalk(const DecodeParams& params, Walk<T>& walk) {
  const int thread = threadIdx.x;
  if (thread == 0) walk.piece = static_cast<int>(blockIdx.x);
  if (params.alike) {
    if (thread == 0) walk.pieces = params.pieces;
    return;
  }
  const int each = SequencesEach<T>(params);
  const int first = min(thread * each, params.sequence_count);
  const int last = min(first + each, params.sequence_count);
  int64_t mine = 0;
#pragma unroll 1
  for (int n = first; n < last; ++n) mine += PlanOf<T>(params, n).cost();
  int64_t all;
  walk.begins[thread] = SumBefore<T::kThreads>(mine, all);
  if (thread == 0) walk.pieces = CutPieces(all, static_cast<int>(gridDim.x));
}

// Goes to the sequence in which the block's piece begins. One thread.
template <class T>
__device__ __forceinline__ void EnterPiece(const DecodeParams& params, Walk<T>& walk) {
  walk.position = walk.pieces.Begin(walk.piece);
  walk.end = walk.pieces.End(walk.piece);
  walk.sequence = params.sequence_count;
  if (walk.position >= walk.end) return;
  if (params.alike) {
    const int64_t cost = params.plan.cost();
    walk.sequence = static_cast<int>(FastDivide(walk.position, cost));
    walk.begin = walk.sequence * cost;
    return;
  }
  int low = 0;  // the last thread whose sequences begin at or before the position
  for (int high = T::kThreads; high - low > 1;) {
    const int middle = (low + high) / 2;
    (walk.begins[middle] <= walk.position ? low : high) = middle;
  }
  walk.sequence = low * SequencesEach<T>(params);
  walk.begin = walk.begins[low];
}

__device__ __forceinline__ KeySource SourceOf(const Attention& a, const ConstTensorView& view,
                                              const Sequence& s, int b, int h) {
  const bool paged = a.problem.page_rows > 0;
  KeySource source;
  source.data = static_cast<const char*>(view.data) +
                2 * (h * view.stride_h + (paged ? 0 : b * view.stride_b + s.k_row * view.stride_l));
  source.stride = static_cast<uint32_t>(2 * view.stride_l / kStrideUnit);
  source.page_stride = static_cast<uint32_t>(2 * view.stride_b / kStrideUnit);
  return source;
}

// The keys that the unit's rows see.
__device__ __forceinline__ void SetKeys(const Mask& mask, Segment& segment) {
  const Sequence& s = segment.sequence;
  segment.key_begin = segment.key_end = segment.full_begin = segment.full_end = 0;
  const auto group = static_cast<uint32_t>(segment.group);
  const int64_t first = static_cast<uint32_t>(segment.row_begin) / group;
  const int64_t last = min(
      int64_t{static_cast<uint32_t>(segment.row_begin + segment.rows - 1) / group}, s.q_len - 1);
  if (first > last) return;
  const KeyRange low = VisibleKeys(mask, s, first);
  const KeyRange high = VisibleKeys(mask, s, last);
  if (low.begin >= high.end) return;
  segment.key_begin = static_cast<int>(low.begin);
  segment.key_end = static_cast<int>(high.end);
  segment.full_begin = static_cast<int>(min(high.begin, s.k_len));
  segment.full_end = static_cast<int>(max(low.end, int64_t{0}));
}

// Describes unit `unit` of the walk's sequence.
template <class T>
__device__ __forceinline__ void Describe(const DecodeParams& params, const Walk<T>& walk, int unit,
                                         Segment& segment) {
  const SequenceId id = IdOf(params, walk.sequence);
  const Attention& a = AttentionOf(params, id);
  const Problem& p = a.problem;
  const SequencePlan& plan = walk.plan;
  const Sequence& s = plan.sequence;
  segment.attention = &a;
  segment.sequence = s;
  if (params.alike) segment.sequence.q_row = segment.sequence.k_row = 0;
  segment.b = id.b;
  segment.h = plan.row_tiles == 1 ? unit : unit / plan.row_tiles;
  segment.group =
      static_cast<int>(static_cast<uint32_t>(p.heads_q) / static_cast<uint32_t>(p.heads_kv));
  segment.row_begin = (unit - segment.h * plan.row_tiles) * T::kRows;
  segment.rows = static_cast<int>(Least(T::kRows, s.q_rows * segment.group - segment.row_begin));
  segment.chunk_shift = plan.chunk_shift;
  segment.first_chunk = plan.first_chunk;
  segment.chunks = plan.chunks;
  segment.chunk_cost = plan.chunk_cost;
  segment.k = SourceOf(a, a.k, s, id.b, segment.h);
  segment.v = SourceOf(a, a.v, s, id.b, segment.h);
  segment.columns_k = static_cast<int>(p.dim);
  segment.columns_v = static_cast<int>(p.dim_v);
  segment.pages = p.page_rows > 0 ? a.kv_pages.pages + id.b * a.kv_pages.stride : nullptr;
  segment.page_shift = __ffs(static_cast<int>(p.page_rows)) - 1;
  segment.page_mask = static_cast<int>(p.page_rows) - 1;
  segment.scale = p.scale;
  segment.softcap = p.softcap;
  segment.has_alibi = p.has_alibi;
  SetKeys(p.mask, segment);
}

// The piece's next segment; one thread. Its attention is null if there is none.
template <class T>
__device__ __forceinline__ void NextSegment(const DecodeParams& params, Walk<T>& walk,
                                            Segment& segment) {
  segment.attention = nullptr;
  int64_t chunk;  // of the sequence, over its units
#pragma unroll 1
  for (;; ++walk.sequence) {
    if (walk.sequence >= params.sequence_count || walk.position >= walk.end) return;
    walk.plan = params.alike ? params.plan : PlanOf<T>(params, walk.sequence);
    chunk = CeilDivide(walk.position - walk.begin, walk.plan.chunk_cost);
    if (chunk < int64_t{walk.plan.units} * walk.plan.chunks) break;
    walk.begin += walk.plan.cost();
    walk.position = max(walk.position, walk.begin);
  }
  const SequencePlan& plan = walk.plan;
  const auto unit = static_cast<int>(FastDivide(chunk, plan.chunks));
  segment.position = walk.begin + unit * plan.unit_cost();
  segment.chunk = static_cast<int>(chunk - int64_t{unit} * plan.chunks);
  const int64_t left = walk.end - segment.position;
  segment.chunk_end =
      left <= 0 ? 0 : static_cast<int>(Least(CeilDivide(left, plan.chunk_cost), plan.chunks));
  walk.position = segment.position + int64_t{segment.chunk_end} * plan.chunk_cost;
  if (segment.chunk >= segment.chunk_end) {  // the piece ends inside a chunk of another
    walk.position = walk.end;
    return;
  }
  Describe<T>(params, walk, unit, segment);
}

// The same over all pieces that the block claims: the next is claimed while this one is computed.
template <class T>
__device__ __forceinline__ void NextWork(const DecodeParams& params, Walk<T>& walk,
                                         Segment& segment, bool enter) {
#pragma unroll 1
  for (;; enter = true) {
    if (enter) {
      if (walk.piece >= walk.pieces.count) {
        segment.attention = nullptr;
        return;
      }
      EnterPiece<T>(params, walk);
      // As many claims as pieces: one for each beyond the blocks' first, and one in vain for each
      // block. The last one leaves the counter at zero.
      walk.next = walk.pieces.count;
      if (walk.pieces.count > walk.pieces.blocks) {
        walk.next = static_cast<int>(atomicInc(&params.queue->next, walk.pieces.count - 1)) +
                    walk.pieces.blocks;
      }
    }
    NextSegment<T>(params, walk, segment);
    if (segment.attention != nullptr) return;
    walk.piece = walk.next;
  }
}

}  // namespace attend::cuda::decode
