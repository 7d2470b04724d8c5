// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by mma.sync: products, and the kernel (see sm80_tile.cuh). Tiles of others
// arrive in one stage of shared memory while those in the other are computed, a step at a time.

#pragma once

#include "kernels/cuda/backward/sm80_weigh.cuh"
#include "kernels/cuda/backward/store_rows.cuh"

namespace attend::cuda::backward {

// sums = own others^T, rows of both along the head dim. `own`: the warp's first row; `others`: the
// step's.
template <class T, class Element, int kDim>
__device__ __forceinline__ void Along(uint32_t own, uint32_t others, StepSums<T>& sums) {
  const BlockOffsets<kDim> left(Second::kRows), right(Second::kColumns);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[T::kSlices][4];
#pragma unroll
    for (int m = 0; m < T::kSlices; ++m) LoadMatrix(own + left.At(m, k), a[m]);
#pragma unroll
    for (int n = 0; n < T::kStepBlocks; n += 2) {
      uint32_t b[4];
      LoadMatrix(others + right.At(n / 2, k), b);
#pragma unroll
      for (int m = 0; m < T::kSlices; ++m) {
        if (k == 0) {
          Multiply<Element>(sums[m][n], a[m], b[0], b[1]);
          Multiply<Element>(sums[m][n + 1], a[m], b[2], b[3]);
        } else {
          MultiplyAdd<Element>(sums[m][n], a[m], b[0], b[1]);
          MultiplyAdd<Element>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// A gradient's rows that the warp owns.
template <class T, int kDim>
using OwnSums = float[T::kSlices][kDim / 8][4];

// sums += pairs others, down the step's rows.
template <class T, class Element, int kDim>
__device__ __forceinline__ void Down(const StepPairs<T>& pairs, uint32_t others,
                                     OwnSums<T, kDim>& sums) {
  const BlockOffsets<kDim> right(Second::kRows);
#pragma unroll
  for (int k = 0; k < T::kStep / 16; ++k) {
    uint32_t a[T::kSlices][4];
#pragma unroll
    for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[m][e] = pairs[m][2 * k + e / 2][e % 2];
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      uint32_t b[4];
      LoadMatrixTransposed(others + right.At(k, j), b);
#pragma unroll
      for (int m = 0; m < T::kSlices; ++m) {
        MultiplyAdd<Element>(sums[m][2 * j], a[m], b[0], b[1]);
        MultiplyAdd<Element>(sums[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <int kSlices, int kBlocks>
__device__ __forceinline__ void Clear(float (&sums)[kSlices][kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kSlices * kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n / kBlocks][n % kBlocks][e] = 0.0f;
  }
}

// What a warp has summed; dims of 0 where nothing is.
template <class T>
struct MmaState {
  static constexpr int kFirst = T::kWantsFirst ? T::kDim : 8;
  static constexpr int kSecond = T::kWantsSecond ? T::kDimV : 8;
  OwnSums<T, kFirst> first;
  OwnSums<T, kSecond> second;
  OwnTerms<T> terms;
};

// T::kStep others from `other` on, the `row`-th of the stage's.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void Step(const MmaParams& params, const MmaWork& work, char* shared,
                                     int stage, int head, int other, int row, MmaState<T>& state) {
  const Sight sight = SightOf<T>(work, other);
  if (sight == Sight::kNone) return;
  const uint32_t base = SharedAddress(shared);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * T::kWarpRows;
  const uint32_t first = base + stage + row * T::FirstRow::kBytes;
  const uint32_t second = base + stage + T::kOffset2 + row * T::SecondRow::kBytes;
  StepSums<T> s, d_p;
  Along<T, Element, T::kDim>(base + warp_row * T::FirstRow::kBytes, first, s);
  if constexpr (T::kWantsFirst) {
    Along<T, Element, T::kDimV>(base + T::kOffsetOwn2 + warp_row * T::SecondRow::kBytes, second,
                                d_p);
  }
  const auto* const terms = reinterpret_cast<const float*>(shared + stage + T::kOffsetTerms) + row;
  const int mine = other + ThreadIndex() % 4 * 2;
  const Attention& a = params.pass.attention;
  if constexpr (kClass != Class::kPlain) {
    WeighGeneral<T, kClass == Class::kDropout>(work, a, work.head + head, sight, mine, state.terms,
                                               terms, s, d_p);
  } else {
    WeighPlain<T>(work, a.problem, sight, mine, state.terms, terms, s, d_p);
  }
  StepPairs<T> pairs;
  if constexpr (T::kWantsSecond) {
    PackSums<T, Element>(s, pairs);
    Down<T, Element, T::kDimV>(pairs, second, state.second);
  }
  if constexpr (T::kWantsFirst) {
    PackSums<T, Element>(d_p, pairs);
    Down<T, Element, T::kDim>(pairs, first, state.first);
  }
}

template <class T, class Element, Class kClass>
__device__ __forceinline__ void Accumulate(const MmaParams& params, const MmaWork& work,
                                           char* shared, MmaState<T>& state) {
  const uint32_t stages = SharedAddress(shared) + T::kOffsetStages;
  LoadOwn<T>(SharedAddress(shared), work);
  LoadOthers<T>(stages, work, 0, work.other_begin);
  CommitCopies();
  if constexpr (!T::kOwnsKeys) LoadOwnTerms<T>(work, state.terms);
  int stage = 0;
  int head = 0;
  int other = work.other_begin;
#pragma unroll 1
  while (head < work.heads) {
    int next_head = head;
    int next = other + T::kOther;
    if (next >= work.other_end) {
      next = work.other_begin;
      ++next_head;
    }
    WaitCopyGroups<0>();
    __syncthreads();  // this stage has arrived, and the other is free
    if (next_head < work.heads) {
      LoadOthers<T>(stages + T::kStageBytes - stage, work, next_head, next);
      CommitCopies();
    }
#pragma unroll 1
    for (int row = 0; row < T::kOther; row += T::kStep) {
      Step<T, Element, kClass>(params, work, shared, T::kOffsetStages + stage, head, other + row,
                               row, state);
    }
    stage = T::kStageBytes - stage;
    head = next_head;
    other = next;
  }
}

// Says whether a sum that counts is not finite.
template <class T, class Element, int kBlocks>
__device__ __forceinline__ bool Store(const MmaParams& params, const MmaWork& work,
                                      const TensorView& to, float factor, int64_t dim,
                                      const float (&sums)[T::kSlices][kBlocks][4]) {
  if (to.data == nullptr) return false;
  const Attention& a = params.pass.attention;
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, work.b);
  const int64_t head = T::kOwnsKeys ? work.head / p.group() : work.head;
  uint16_t* const data = static_cast<uint16_t*>(to.data) + work.b * to.stride_b +
                         head * to.stride_h + (T::kOwnsKeys ? s.k_row : s.q_row) * to.stride_l;
  bool found = false;
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
    found |= StoreRows<8 * kBlocks, !std::is_same_v<Element, __half>>(
        &sums[m][0][0], factor, data, to.stride_l, OwnRow<T>(work, m, 0), work.own_length,
        work.own_count, static_cast<int>(dim));
  }
  return found;
}

template <class T, class Element, Class kClass>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    GradientsSm80(const __grid_constant__ MmaParams params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ MmaWork work;
  if (threadIdx.x == 0) SetUp<T>(params, work);
  __syncthreads();
  if (work.begin >= work.own_count) return;
  MmaState<T> state;
  Clear(state.first);
  Clear(state.second);
  if (work.other_begin < work.other_end) {
    Accumulate<T, Element, kClass>(params, work, shared, state);
  }
  const Gradients& g = params.pass.gradients;
  const Problem& p = params.pass.attention.problem;
  bool found = false;
  if constexpr (T::kWantsSecond) {
    found |= Store<T, Element>(params, work, g.d_v,
                               kClass == Class::kDropout ? DropoutScale(p.dropout) : 1.0f, p.dim_v,
                               state.second);
  }
  if constexpr (T::kWantsFirst) {
    found |=
        Store<T, Element>(params, work, T::kOwnsKeys ? g.d_k : g.d_q, p.scale, p.dim, state.first);
  }
  if (found) *params.pass.redo = 1;
}

}  // namespace attend::cuda::backward
