// SPDX-License-Identifier: Apache-2.0
//
// Many rows on Hopper, where the products of a tile take about as long as reading it: warps of
// their own, the producers, copy K and V to a ring of places, so that neither warpgroup waits for
// the other or for copies while there is a place left. Device code.
//
//   producers (128 threads)                         two warpgroups of 64 rows
//   copy K0, V0, K1, V1, ... to the next place  --- full[place] --->  multiply
//   as soon as it is free                       <-- empty[place] ---  have read it

#pragma once

#include <cstdint>

#include "kernels/cuda/decode/between_splits.cuh"
#include "kernels/cuda/decode/softmax.cuh"

namespace attend::cuda::decode {

// In the block's shared memory. Set up again for every stream of splits.
template <class T>
struct Ring {
  Barrier full[T::kPlaces], empty[T::kPlaces];
  // The last stream tells the producers its next split, and whether that needs care.
  int split;
  bool care;
  int stop;  // the places are read no more
};

template <class T>
__device__ __forceinline__ Ring<T>& RingOf(char* shared) {
  static_assert(sizeof(Ring<T>) <= 256);
  return *reinterpret_cast<Ring<T>*>(shared + T::kOffsetRing);
}

// One thread; others may use it after the next barrier of the block.
template <class T>
__device__ __forceinline__ void InitRing(Ring<T>& ring, bool again) {
#pragma unroll 1
  for (int n = 0; n < T::kPlaces; ++n) {
    for (Barrier* const barrier : {&ring.full[n], &ring.empty[n]}) {
      const uint32_t address = SharedAddress(barrier);
      if (again) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address) : "memory");
      InitBarrier(address, barrier == &ring.full[n] ? kProducers : T::kThreads / 32);
    }
  }
  ring.stop = 0;
  FenceBarrierInit();
}

// A position in the ring: places in turn, and the parity of the place's phase.
template <class T>
struct RingPosition {
  int place = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++place < T::kPlaces) return;
    place = 0;
    parity ^= 1;
  }
  __device__ __forceinline__ uint32_t In(uint32_t shared) const {
    return shared + T::kOffsetStages + place * T::kTileBytes;
  }
};

// Per thread; a multiprocessor has 65536.
inline constexpr int kProducerRegisters = 72;
inline constexpr int kRingRegisters = 216;

// ---- producers ----------------------------------------------------------------------------------

// The tile as its producers load it.
template <class T>
struct Produced : T {
  static constexpr int kPassRows = kProducers / 8;
  static constexpr int kPasses = T::kKeys / kPassRows;
  static constexpr int kPassesAtOnce = kPasses;
  static __device__ __forceinline__ int Loader() { return ThreadIndex() - T::kThreads; }
};

// Waits until the place is free. False: it will not be read. The same for all threads of a warp.
template <class T>
__device__ __forceinline__ bool AwaitFree(const Ring<T>& ring, const RingPosition<T>& at) {
  const uint32_t barrier = SharedAddress(&ring.empty[at.place]);
  for (;;) {
    int free;
    asm volatile(
        "{ .reg .pred free;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 free, [%1], %2;\n"
        "selp.b32 %0, 1, 0, free; }"
        : "=r"(free)
        : "r"(barrier), "r"(at.parity ^ 1)
        : "memory");
    if (__all_sync(0xffffffffu, free)) return true;
    if (__any_sync(0xffffffffu, *const_cast<const volatile int*>(&ring.stop))) return false;
  }
}

// Copies K and V of the segment's keys from split `split` on, as Stream reads them.
template <class T>
__device__ __forceinline__ void ProduceStream(const Segment& segment, uint32_t shared,
                                              Ring<T>& ring, int split) {
  using Copier = Produced<T>;
  // Copies that may be in flight while others are started. A place is filled once its copies have
  // arrived and the copy engine's proxy, by which products read, has been told.
  constexpr int kInFlight = 2;
  int key = RangeOf<T>(segment, split).begin;
  const int end = RangeOf<T>(segment, segment.split_end - 1).end;
  PageNumbers<Copier> pages, next;
  FindPages<Copier>(segment, key, end, pages);
  RingPosition<T> at, filled;
  const auto fill = [&] {
    FenceAsyncProxy();
    Arrive(SharedAddress(&ring.full[filled.place]));
    filled.Advance();
  };
  int started = 0;
#pragma unroll 1
  for (; key < end; key += T::kKeys) {
    FindPages<Copier>(segment, key + T::kKeys, end, next);
#pragma unroll 1
    for (int tensor = 0; tensor < 2; ++tensor) {
      if (!AwaitFree<T>(ring, at)) {
        WaitCopyGroups<0>();
        return;
      }
      const KeySource& source = tensor == 0 ? segment.k : segment.v;
      const int columns = tensor == 0 ? segment.columns_k : segment.columns_v;
      LoadTensor<Copier>(segment, source, columns, at.In(shared), key, end, pages);
      CommitCopies();
      at.Advance();
      if (started < kInFlight) {
        ++started;
      } else {
        WaitCopyGroups<kInFlight>();
        fill();
      }
    }
#pragma unroll
    for (int pass = 0; pass < Copier::kPasses; ++pass) pages[pass] = next[pass];
  }
  WaitCopyGroups<0>();
  for (; started > 0; --started) fill();
}

// Follows ComputeSegment's course.
template <class T>
__device__ __forceinline__ void ProduceSegment(const Segment& segment, char* shared) {
  Ring<T>& ring = RingOf<T>(shared);
#pragma unroll 1
  for (int split = segment.split; split < segment.split_end;) {
    const SplitRange range = RangeOf<T>(segment, split);
    if (range.begin < range.end) {
      ProduceStream<T>(segment, SharedAddress(shared), ring, split);
      __syncthreads();  // the stream has ended on both sides
      split = ring.split;
      const bool care = ring.care;
      __syncthreads();  // the ring is set up again
      if (!care) continue;
    }
    __syncthreads();  // CarefulSplit no longer uses the places
    ++split;
  }
}

// ---- products -----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void AwaitFull(const Ring<T>& ring, const RingPosition<T>& at) {
  Wait(SharedAddress(&ring.full[at.place]), at.parity);
}
// The warp has read the place.
template <class T>
__device__ __forceinline__ void Free(const Ring<T>& ring, RingPosition<T>& at) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&ring.empty[at.place]));
  at.Advance();
}

// Step (softmax.cuh) on the ring's next two places.
template <class T, class Element>
__device__ __forceinline__ void RingStep(const Segment& segment, const Place<T>& place,
                                         const Ring<T>& ring, RingPosition<T>& at, int key,
                                         RowState<T>& state) {
  Scores<T> s;
  AwaitFull<T>(ring, at);
  Score<T, Element>(place, at.In(place.shared), s);
  Free<T>(ring, at);
  FinishScores<T>(segment, place, key, s);
  Weights<T> p;
  constexpr int kHalf = T::kKeyBlocks / 2;
  float reference[2];
  FollowMaxima<T>(s, state, reference);
  WeighBlocks<T, Element>(1.0f, s, reference, 0, kHalf, state, p);
  AwaitFull<T>(ring, at);
  const uint32_t values = at.In(place.shared);
  StartAccumulate<T, Element>(values, p, 0, kHalf, state.output);
  WeighBlocks<T, Element>(1.0f, s, reference, kHalf, T::kKeyBlocks, state, p);
  StartAccumulate<T, Element>(values, p, kHalf, T::kKeyBlocks, state.output);
  FinishAccumulate<T>(state.output);
  Free<T>(ring, at);
}

// Stream (kernel.cuh) of what the producers copy.
template <class T, class Element, class Block>
__device__ __forceinline__ int RingStream(const DecodeParams& params, Block& block, char* shared,
                                          const Place<T>& place, OpenGroup& group, int split,
                                          bool& care) {
  const Segment& segment = block.segment;
  int key = RangeOf<T>(segment, split).begin;
  const int end = RangeOf<T>(segment, segment.split_end - 1).end;
  int split_end = RangeOf<T>(segment, split).end;
  Ring<T>& ring = RingOf<T>(shared);
  RingPosition<T> at;
  RowState<T> state;
  Start<T>(state);
#pragma unroll 1
  for (; key < end; key += T::kKeys) {
    RingStep<T, Element>(segment, place, ring, at, key, state);
    if (key + T::kKeys < split_end) continue;
    Open(params, block, split, group);
    const Partial partial = PartialAt(params, group.run.first + split % kFanIn);
    care = !StoreSplit<T, Element>(segment, place, true, 1.0f, nullptr, partial, block.exchange,
                                   state);
    if (care) break;
    AfterSplit<T, Element>(params, block, group, split);
    ++split;
    if (split < segment.split_end) split_end = RangeOf<T>(segment, split).end;
    Start<T>(state);
  }
  Sync<T>();  // the exchange has been read
  if (threadIdx.x == 0) {
    ring.split = split;
    ring.care = care;
    *const_cast<volatile int*>(&ring.stop) = 1;
  }
  __syncthreads();  // the producers have ended too
  if (threadIdx.x == 0) InitRing<T>(ring, true);
  __syncthreads();
  return split;
}

}  // namespace attend::cuda::decode
