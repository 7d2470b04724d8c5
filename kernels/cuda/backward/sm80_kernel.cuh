// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by mma.sync: products, and the kernel (see sm80_tile.cuh). Tiles of the others
// are loaded into one stage of shared memory while those in the other stage are processed, one step
// at a time.

#pragma once

#include "kernels/cuda/backward/sm80_weigh.cuh"
#include "kernels/cuda/backward/store_rows.cuh"

namespace attend::cuda::backward {

// sums = own others^T, rows of both along the head dim. `own`: the warp's first row; `others`: the
// step's first.
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

// The warp's own rows along the head dim, as register operands.
template <class T, int kDim>
struct HeldRows {
  uint32_t blocks[kDim / 16][T::kSlices][4];

  __device__ __forceinline__ void Load(uint32_t own) {
    const BlockOffsets<kDim> left(Second::kRows);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int m = 0; m < T::kSlices; ++m) LoadMatrix(own + left.At(m, k), blocks[k][m]);
    }
  }
};

// Along for held rows: the same products in the same order.
template <class T, class Element, int kDim>
__device__ __forceinline__ void Along(const HeldRows<T, kDim>& own, uint32_t others,
                                      StepSums<T>& sums) {
  const BlockOffsets<kDim> right(Second::kColumns);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
    for (int n = 0; n < T::kStepBlocks; n += 2) {
      uint32_t b[4];
      LoadMatrix(others + right.At(n / 2, k), b);
#pragma unroll
      for (int m = 0; m < T::kSlices; ++m) {
        if (k == 0) {
          Multiply<Element>(sums[m][n], own.blocks[k][m], b[0], b[1]);
          Multiply<Element>(sums[m][n + 1], own.blocks[k][m], b[2], b[3]);
        } else {
          MultiplyAdd<Element>(sums[m][n], own.blocks[k][m], b[0], b[1]);
          MultiplyAdd<Element>(sums[m][n + 1], own.blocks[k][m], b[2], b[3]);
        }
      }
    }
  }
}

// The warp's owned rows of a gradient.
template <class T, int kDim>
using OwnSums = float[T::kSlices][kDim / 8][4];

// sums += pairs others, down the step's rows. `others`: rows of kDim columns, from the first column
// summed.
template <class T, class Element, int kDim>
__device__ __forceinline__ void Down(const StepPairs<T>& pairs, uint32_t others,
                                     OwnSums<T, kDim / T::kShare>& sums) {
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
    for (int j = 0; j < kDim / T::kShare / 16; ++j) {
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

// A warp's accumulators; minimal size for gradients that are not computed.
template <class T>
struct MmaState {
  static constexpr int kFirst = T::kWantsFirst ? T::kDim / T::kShare : 8;
  static constexpr int kSecond = T::kWantsSecond ? T::kDimV / T::kShare : 8;
  OwnSums<T, kFirst> first;
  OwnSums<T, kSecond> second;
  OwnTerms<T> terms;
};

// Position of a step: query head, first other, and its row within the stage.
struct StepPlace {
  int head, other, row;
  int stage;  // address in shared memory
};

// Computes the products of T::kStep others into `s` and `d_p`, and loads their bias.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void Products(const Attention& a, const MmaWork& work, char* shared,
                                         const StepPlace& at, StepSums<T>& s, StepSums<T>& d_p,
                                         StepSums<T>& bias) {
  const int mine = at.other + ThreadIndex() % 4 * 2;
  if constexpr (kClass != Class::kPlain) {
    if (a.problem.has_bias) LoadBias<T>(work, a.bias, work.head + at.head, mine, bias);
  }
  const uint32_t base = SharedAddress(shared);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 / T::kShare * T::kWarpRows;
  Along<T, Element, T::kDim>(base + warp_row * T::FirstRow::kBytes,
                             base + at.stage + at.row * T::FirstRow::kBytes, s);
  if constexpr (T::kWantsFirst) {
    Along<T, Element, T::kDimV>(base + T::kOffsetOwn2 + warp_row * T::SecondRow::kBytes,
                                base + at.stage + T::kOffset2 + at.row * T::SecondRow::kBytes, d_p);
  }
}

// Computes P into `s` and dS into `d_p`, for T::kStep others.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void Weigh(const MmaParams& params, const MmaWork& work, char* shared,
                                      const StepPlace& at, Sight sight, const OwnTerms<T>& own,
                                      StepSums<T>& s, StepSums<T>& d_p) {
  const Attention& a = params.pass.attention;
  const int mine = at.other + ThreadIndex() % 4 * 2;
  StepSums<T> bias;
  Products<T, Element, kClass>(a, work, shared, at, s, d_p, bias);
  const auto* const terms =
      reinterpret_cast<const float*>(shared + at.stage + T::kOffsetTerms) + at.row;
  if constexpr (kClass == Class::kPlain) {
    WeighPlain<T>(work, at.head, sight, mine, own, terms, s, d_p);
  } else {
    WeighGeneral<T, kClass == Class::kDropout>(work, a, at.head, sight, mine, own, terms, bias, s,
                                               d_p);
  }
}

// Adds the contributions of T::kStep others to the gradients.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void Step(const MmaParams& params, const MmaWork& work, char* shared,
                                     const StepPlace& at, MmaState<T>& state) {
  const Sight sight = SightOf<T>(work, at.other, T::kStep);
  if (sight == Sight::kNone) return;
  StepSums<T> s, d_p;
  Weigh<T, Element, kClass>(params, work, shared, at, sight, state.terms, s, d_p);
  const uint32_t base = SharedAddress(shared) + at.stage;
  StepPairs<T> pairs;
  if constexpr (T::kWantsSecond) {
    PackSums<T, Element>(s, pairs);
    Down<T, Element, T::kDimV>(pairs, base + T::kOffset2 + at.row * T::SecondRow::kBytes,
                               state.second);
  }
  if constexpr (T::kWantsFirst) {
    PackSums<T, Element>(d_p, pairs);
    Down<T, Element, T::kDim>(pairs, base + at.row * T::FirstRow::kBytes, state.first);
  }
}

// ---- warps that share rows ----------------------------------------------------------------------

// Barrier between the two warps.
__device__ __forceinline__ void SyncSharers() {
  asm volatile("bar.sync %0, 64;" ::"r"(threadIdx.x / 64 + 1) : "memory");
}

// Exchange with the other warp, in register layout.
template <class T>
__device__ __forceinline__ void GivePairs(char* to, const StepPairs<T>& pairs) {
  auto* const lane = reinterpret_cast<uint4*>(to) + threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < T::kSlices * T::kStepBlocks / 2; ++n) {
    const auto& first = pairs[n / (T::kStepBlocks / 2)][n % (T::kStepBlocks / 2) * 2];
    const auto& second = pairs[n / (T::kStepBlocks / 2)][n % (T::kStepBlocks / 2) * 2 + 1];
    lane[32 * n] = make_uint4(first[0], first[1], second[0], second[1]);
  }
}
template <class T>
__device__ __forceinline__ void TakePairs(const char* from, StepPairs<T>& pairs) {
  const auto* const lane = reinterpret_cast<const uint4*>(from) + threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < T::kSlices * T::kStepBlocks / 2; ++n) {
    const uint4 x = lane[32 * n];
    auto& first = pairs[n / (T::kStepBlocks / 2)][n % (T::kStepBlocks / 2) * 2];
    auto& second = pairs[n / (T::kStepBlocks / 2)][n % (T::kStepBlocks / 2) * 2 + 1];
    first[0] = x.x, first[1] = x.y, second[0] = x.z, second[1] = x.w;
  }
}

// Step shared by two warps, over all of a stage's others. Each computes P and dS of one half of
// them, and sums one half of the gradients' columns over all.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void SharedStep(const MmaParams& params, const MmaWork& work,
                                           char* shared, StepPlace at, MmaState<T>& state) {
  if (SightOf<T>(work, at.other, T::kOther) == Sight::kNone) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int half = warp % 2;
  constexpr int kKindBytes = T::kGivenBytes / T::kKinds;
  char* const given = shared + T::kOffsetGiven + warp * T::kGivenBytes;
  const char* const taken = shared + T::kOffsetGiven + (warp ^ 1) * T::kGivenBytes;
  at.row = half * T::kStep;
  at.other += at.row;
  // Each half of the columns is whole swizzle spans.
  const uint32_t first = SharedAddress(shared) + at.stage + half * T::kDim;
  const uint32_t second = SharedAddress(shared) + at.stage + T::kOffset2 + half * T::kDimV;
  const int other_row = T::kStep - at.row;
  StepPairs<T> weights, d_scores;
  {
    StepSums<T> s, d_p;
    const Sight sight = SightOf<T>(work, at.other, T::kStep);
    Weigh<T, Element, kClass>(params, work, shared, at,
                              sight == Sight::kAll ? Sight::kAll : Sight::kSome, state.terms, s,
                              d_p);
    PackSums<T, Element>(s, weights);
    PackSums<T, Element>(d_p, d_scores);
  }
  GivePairs<T>(given, weights);
  GivePairs<T>(given + kKindBytes, d_scores);
  Down<T, Element, T::kDimV>(weights, second + at.row * T::SecondRow::kBytes, state.second);
  SyncSharers();
  TakePairs<T>(taken, weights);
  Down<T, Element, T::kDim>(d_scores, first + at.row * T::FirstRow::kBytes, state.first);
  TakePairs<T>(taken + kKindBytes, d_scores);
  Down<T, Element, T::kDimV>(weights, second + other_row * T::SecondRow::kBytes, state.second);
  Down<T, Element, T::kDim>(d_scores, first + other_row * T::FirstRow::kBytes, state.first);
}

// Walks the others: calls step(place) for each stage of them.
template <class T, class DoStep>
__device__ __forceinline__ void Walk(const MmaWork& work, char* shared, const DoStep& step) {
  const uint32_t stages = SharedAddress(shared) + T::kOffsetStages;
  LoadOwn<T>(SharedAddress(shared), work);
  LoadOthers<T>(stages, work, 0, work.other_begin);
  CommitCopies();
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
    step(StepPlace{head, other, 0, static_cast<int>(T::kOffsetStages) + stage});
    stage = T::kStageBytes - stage;
    head = next_head;
    other = next;
  }
}

template <class T, class Element, Class kClass>
__device__ __forceinline__ void Accumulate(const MmaParams& params, const MmaWork& work,
                                           char* shared, MmaState<T>& state) {
  if constexpr (!T::kOwnsKeys) LoadOwnTerms<T>(work, state.terms);
  Walk<T>(work, shared, [&](const StepPlace& at) {
    if constexpr (T::kShare == 2) {
      SharedStep<T, Element, kClass>(params, work, shared, at, state);
    } else {
#pragma unroll 1
      for (int row = 0; row < T::kOther; row += T::kStep) {
        Step<T, Element, kClass>(params, work, shared, {at.head, at.other + row, row, at.stage},
                                 state);
      }
    }
  });
}

// Stores a gradient; returns whether an element that counts is not finite.
template <class T, class Element, int kBlocks>
__device__ __forceinline__ bool Store(const MmaParams& params, const MmaWork& work,
                                      const TensorView& to, float factor, int64_t dim,
                                      const float (&sums)[T::kSlices][kBlocks][4]) {
  if (to.data == nullptr) return false;
  const Attention& a = params.pass.attention;
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, work.b);
  const int column = T::kShare == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % 2 * 8 * kBlocks;
  const int64_t head = T::kOwnsKeys ? work.head / p.group() : work.head;
  uint16_t* const data = static_cast<uint16_t*>(to.data) + work.b * to.stride_b +
                         head * to.stride_h + (T::kOwnsKeys ? s.k_row : s.q_row) * to.stride_l +
                         column;
  bool found = false;
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
    found |= StoreRows<8 * kBlocks, !std::is_same_v<Element, __half>, false>(
        &sums[m][0][0], factor, data, to.stride_l, OwnRow<T>(work, m, 0), work.own_length,
        work.own_count, static_cast<int>(dim) - column);
  }
  return found;
}

template <class T, class Element, Class kClass, int kCount>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    GradientsSm80(const __grid_constant__ LaunchList<MmaParams, kCount> list) {
  const MmaParams& params = list.Of(blockIdx.x);
  extern __shared__ __align__(128) char shared[];
  __shared__ MmaWork work;
  if (threadIdx.x == 0) SetUp<T>(params, blockIdx.x, work);
  __syncthreads();
  if (work.begin >= work.own_count) return;
  MmaState<T> state;
  Clear(state.first);
  Clear(state.second);
  if (work.other_begin < work.other_end) {
    Accumulate<T, Element, kClass>(params, work, shared, state);
  }
  // Not `params`: the loop has no register to spare for its address.
  const MmaParams& after = list.Of(BlockIndex());
  const Gradients& g = after.pass.gradients;
  const Problem& p = after.pass.attention.problem;
  bool found = false;
  if constexpr (T::kWantsSecond) {
    found |= Store<T, Element>(after, work, g.d_v,
                               kClass == Class::kDropout ? DropoutScale(p.dropout) : 1.0f, p.dim_v,
                               state.second);
  }
  if constexpr (T::kWantsFirst) {
    found |=
        Store<T, Element>(after, work, T::kOwnsKeys ? g.d_k : g.d_q, p.scale, p.dim, state.first);
  }
  if (found) after.pass.flags->redo = 1;
}

}  // namespace attend::cuda::backward
