// SPDX-License-Identifier: Apache-2.0
//
// The decoding kernels: few query rows against long K and V. They are bound by reading K and V
// once, so all query heads of a KV head and all query rows share a tile, keys are distributed over
// the whole device (plan.h), and a ring of tiles is always in flight to shared memory, across the
// ends of splits too. cuda_decode_sm80 multiplies with mma.sync, cuda_decode_sm90 with wgmma.
// Device code, instantiated by f16.cu, bf16.cu, sm90_f16.cu and sm90_bf16.cu.

#pragma once

#include <type_traits>

#include "kernels/cuda/decode/between_splits.cuh"
#include "kernels/cuda/decode/direct_stream.cuh"
#include "kernels/cuda/decode/ring.cuh"
#include "kernels/cuda/decode/softmax.cuh"

namespace attend::cuda::decode {

template <class T>
struct BlockShared {
  Walk<T> walk;
  Segment segment;
  Exchange<T> exchange;
};

template <class T>
__device__ __forceinline__ uint32_t StageAt(int stage) {
  return T::kOffsetStages + stage * T::kStageBytes;
}

// Streams the segment's keys from split `split` on, which must have some. Returns the split that it
// could not close because it needs care, the first without keys, or the segment's end.
template <class T, class Element>
__device__ __forceinline__ int Stream(const DecodeParams& params, BlockShared<T>& block,
                                      char* shared, Place<T>& place, OpenGroup& group, int split,
                                      bool& care) {
  const Segment& segment = block.segment;
  int key = RangeOf<T>(segment, split).begin;
  const int end = RangeOf<T>(segment, segment.split_end - 1).end;
  int split_end = RangeOf<T>(segment, split).end;
  PageNumbers<T> pages[T::kStages - 1];
#pragma unroll
  for (int n = 0; n < T::kStages - 1; ++n) FindPages<T>(segment, key + n * T::kKeys, end, pages[n]);
  PageNumbers<T> next;
  FindPages<T>(segment, key + (T::kStages - 1) * T::kKeys, end, next);
#pragma unroll
  for (int n = 0; n < T::kStages - 1; ++n) {
    LoadTile<T>(segment, place.shared + StageAt<T>(n), key + n * T::kKeys, end, pages[n]);
    CommitCopies();
  }
  RowState<T> state;
  Start<T>(state);
  bool first = true;
#pragma unroll 1
  for (int stage = 0; key < end; key += T::kKeys, stage = stage + 1 == T::kStages ? 0 : stage + 1) {
    WaitCopyGroups<T::kStages - 2>();
    ShowToProducts<T>();
    __syncthreads();  // the tile has arrived; the previous one has been read
    const int far = key + (T::kStages - 1) * T::kKeys;
    if (far < end) {
      const int behind = stage == 0 ? T::kStages - 1 : stage - 1;
      if constexpr (T::kFewRegisters) FindPages<T>(segment, far, end, next);
      LoadTile<T>(segment, place.shared + StageAt<T>(behind), far, end, next);
      if constexpr (!T::kFewRegisters) FindPages<T>(segment, far + T::kKeys, end, next);
    }
    CommitCopies();
    if (first) KeepQuery<T>(place);
    first = false;
    Step<T, Element>(segment, place, place.shared + StageAt<T>(stage), key, state);
    if (key + T::kKeys < split_end) continue;
    Open(params, block, split, group);
    const Partial partial = PartialAt(params, group.run.first + split % kFanIn);
    care = !StoreSplit<T, Element>(segment, place, true, 1.0f, shared + StageAt<T>(stage), partial,
                                   block.exchange, state);
    if (care) break;
    AfterSplit<T, Element>(params, block, group, split);
    ++split;
    if (split < segment.split_end) split_end = RangeOf<T>(segment, split).end;
    Start<T>(state);
  }
  WaitCopyGroups<0>();
  __syncthreads();
  return split;
}

// Recomputes a split whose values are not finite or whose sums overflowed fp32, one tile at a time.
template <class T, class Element>
__device__ __forceinline__ void CarefulSplit(const DecodeParams& params, BlockShared<T>& block,
                                             char* shared, const Place<T>& place, OpenGroup& group,
                                             int split) {
  const Segment& segment = block.segment;
  CommitCopies();
  WaitCopyGroups<0>();  // of Q too, if no tile has waited: the next segment's overwrites it
  const SplitRange range = RangeOf<T>(segment, split);
  RowState<T> state;
  Start<T>(state);
#pragma unroll 1
  for (int key = range.begin; key < range.end; key += T::kKeys) {
    PageNumbers<T> pages;
    FindPages<T>(segment, key, range.end, pages);
    LoadTile<T>(segment, place.shared + StageAt<T>(0), key, range.end, pages);
    CommitCopies();
    WaitCopyGroups<0>();
    ShowToProducts<T>();
    Sync<T>();
    CarefulStep<T, Element>(segment, place, shared, StageAt<T>(0), key, state);
    Sync<T>();
  }
  Open(params, block, split, group);
  const Partial partial = PartialAt(params, group.run.first + split % kFanIn);
  (void)StoreSplit<T, Element>(segment, place, false, kSmallUnit<Element>, shared + StageAt<T>(0),
                               partial, block.exchange, state);
  AfterSplit<T, Element>(params, block, group, split);
  Sync<T>();  // the exchange has been read
}

template <class T, class Element>
__device__ __forceinline__ void ComputeSegment(const DecodeParams& params, BlockShared<T>& block,
                                               char* shared) {
  const Segment& segment = block.segment;
  Place<T> place;
  SetPlace<T>(segment, SharedAddress(shared), place);
  LoadQuery<T>(segment, place.shared);  // arrives with the first tile
  if constexpr (T::kPlaces > 0) {
    CommitCopies();
    WaitCopyGroups<0>();
    ShowToProducts<T>();
    Sync<T>();
  }
  if (segment.has_bits) {
    FindHidden<T>(block.segment);
    Sync<T>();
  }
  OpenGroup group;
#pragma unroll 1
  for (int split = segment.split; split < segment.split_end;) {
    const SplitRange range = RangeOf<T>(segment, split);
    bool care = false;
    if (range.begin < range.end) {
      if constexpr (T::kPlaces > 0) {
        split = RingStream<T, Element>(params, block, shared, place, group, split, care);
      } else {
        split = Stream<T, Element>(params, block, shared, place, group, split, care);
      }
      if (!care) continue;
    }
    CarefulSplit<T, Element>(params, block, shared, place, group, split);  // also of no keys
    if constexpr (T::kPlaces > 0) __syncthreads();
    ++split;
  }
}

template <class T>
using SharedOf = std::conditional_t<T::kDirect, DirectShared<T>, BlockShared<T>>;

// The block's segments, one after another: the part of the threads that multiply, or of producers.
template <class T, class Element, bool kProduces>
__device__ __forceinline__ void ComputeSegments(const DecodeParams& params, SharedOf<T>& block,
                                                char* shared) {
#pragma unroll 1
  for (bool first = true;; first = false) {
    __syncthreads();  // shared memory is free
    if (!kProduces && threadIdx.x == 0) {
      if (first) EnterShare<T>(params, block.walk);
      NextSegment<T>(params, block.walk, block.segment);
    }
    __syncthreads();
    if (block.segment.attention == nullptr) return;
    if constexpr (kProduces) {
      ProduceSegment<T>(block.segment, shared);
    } else {
      ComputeSegment<T, Element>(params, block, shared);  // overloaded on the kind of block
    }
  }
}

template <class T, class Element>
__global__ void __launch_bounds__(T::kBlockThreads, T::kBlocks)
    DecodeKernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) char memory[];
  char* shared = memory;
  if constexpr (T::kWgmma) shared += (T::kAlign - SharedAddress(memory) % T::kAlign) % T::kAlign;
  __shared__ SharedOf<T> block;
  StartWalk<T>(params, block.walk, block.segment);
  if constexpr (T::kPlaces > 0) {
    if (threadIdx.x == 0) InitRing<T>(RingOf<T>(shared), false);
    // Broadcast, so that the compiler knows it to be uniform.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp >= T::kThreads / 32) {
      ReleaseRegisters<kProducerRegisters>();
      ComputeSegments<T, Element, true>(params, block, shared);
      return;
    }
    TakeRegisters<kRingRegisters>();
  }
  ComputeSegments<T, Element, false>(params, block, shared);
}

}  // namespace attend::cuda::decode
