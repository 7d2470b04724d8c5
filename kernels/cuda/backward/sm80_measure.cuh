// SPDX-License-Identifier: Apache-2.0
//
// Measures rows (measure.cuh) for the kernels of 16-bit products, by mma.sync: computes scores and
// dP of a block's rows, and sums weights and P dP. On Hopper wgmma's products have the same bits,
// so the wgmma kernels can use these terms.

#pragma once

#include "kernels/cuda/backward/measure.cuh"
#include "kernels/cuda/backward/sm80_kernel.cuh"

namespace attend::cuda::backward {

// Unit of scores, and their conversion to those that RowMeasure takes.
struct MeasureUnit {
  float unit;        // log2 of the weight per unit of such a score; positive
  float sign;        // sign of the kernel's scores relative to them
  bool of_products;  // scores are raw products of Q and K

  template <Class kClass>
  static __device__ __forceinline__ MeasureUnit Of(const BackwardPass& pass) {
    const Problem& p = pass.attention.problem;
    const bool products =
        kClass == Class::kPlain || (pass.lse_unit == kLog2E && CapOf(p).value == 0.0f);
    const float unit = products ? p.scale * kLog2E : kLog2E;
    // A scale of 0 becomes the smallest subnormal: products with it are 0, but a score of -inf is
    // kept.
    return {fmaxf(fabsf(unit), 0x1p-149f), unit < 0.0f ? -1.0f : 1.0f, products};
  }
};

// A thread's part of its rows.
template <class T>
using OwnMeasures = RowMeasure[2 * T::kSlices];

// The warp's rows of Q and dO in registers, if score terms leave room for them.
template <class T>
struct MeasuredRows {
  HeldRows<T, T::kDim> q;
  HeldRows<T, T::kDimV> d_o;

  __device__ __forceinline__ void Load(char* shared) {
    const uint32_t base = SharedAddress(shared);
    const int row = static_cast<int>(threadIdx.x) / 32 * T::kWarpRows;
    q.Load(base + row * T::FirstRow::kBytes);
    d_o.Load(base + T::kOffsetOwn2 + row * T::SecondRow::kBytes);
  }
};

template <class T>
__device__ __forceinline__ void AddStep(const MeasureUnit& unit, StepSums<T>& s, StepSums<T>& d_p,
                                        OwnMeasures<T>& rows) {
#pragma unroll
  for (int r = 0; r < 2 * T::kSlices; ++r) {
    float most = NegativeInfinity();
#pragma unroll
    for (int n = 0; n < 2 * T::kStepBlocks; ++n) {
      most = fmaxf(most, s[r / 2][n / 2][r % 2 * 2 + n % 2]);
    }
    rows[r].Raise(most, unit.unit);
#pragma unroll
    for (int n = 0; n < 2 * T::kStepBlocks; ++n) {
      rows[r].Add(s[r / 2][n / 2][r % 2 * 2 + n % 2], d_p[r / 2][n / 2][r % 2 * 2 + n % 2],
                  unit.unit);
    }
  }
}

template <class T, class Element, Class kClass>
__device__ __forceinline__ void MeasureStep(const MmaParams& params, const MmaWork& work,
                                            char* shared, const StepPlace& at,
                                            const MeasureUnit& unit, const MeasuredRows<T>& own,
                                            OwnMeasures<T>& rows) {
  const Sight sight = SightOf<T>(work, at.other, T::kStep);
  if (sight == Sight::kNone) return;
  const Attention& a = params.pass.attention;
  const int mine = at.other + ThreadIndex() % 4 * 2;
  StepSums<T> s, d_p;
  if constexpr (kClass == Class::kPlain) {
    const uint32_t base = SharedAddress(shared) + at.stage;
    Along<T, Element, T::kDim>(own.q, base + at.row * T::FirstRow::kBytes, s);
    Along<T, Element, T::kDimV>(own.d_o, base + T::kOffset2 + at.row * T::SecondRow::kBytes, d_p);
    if (unit.sign < 0.0f) {
      ForPairs<T>({}, nullptr,
                  [&](int n, int r, int e, PairTerms) { s[r / 2][n][r % 2 * 2 + e] *= -1.0f; });
    }
  } else {
    StepSums<T> bias;
    Products<T, Element, kClass>(a, work, shared, at, s, d_p, bias);
    ScoreGeneral<T, kClass == Class::kDropout>(work, a, at.head, mine, {}, nullptr, bias, s, d_p);
  }
  if (sight == Sight::kSome) HidePairs<T>(work, mine, s, NegativeInfinity());
  if (kClass != Class::kPlain || sight == Sight::kSome) {
    ForPairs<T>({}, nullptr, [&](int n, int r, int e, PairTerms) {
      if (s[r / 2][n][r % 2 * 2 + e] == NegativeInfinity()) d_p[r / 2][n][r % 2 * 2 + e] = 0.0f;
    });
  }
  AddStep<T>(unit, s, d_p, rows);
}

// Measures the block's rows, if one of them needs it.
template <class T, class Element, Class kClass>
__device__ __forceinline__ void MeasureTile(const MmaParams& params, MmaWork& work, char* shared) {
  const BackwardPass& pass = params.pass;
  const Sequence s = SequenceOf(pass.attention, work.b);
  const int end = min(work.begin + T::kOwn, work.own_length);
  if (!IsAnyMeasured(pass, s, work.b, work.head, work.begin, end)) return;
  const MeasureUnit unit = MeasureUnit::Of<kClass>(pass);
  if (threadIdx.x == 0 && unit.of_products) work.factor = 1.0f;
  OwnMeasures<T> rows;
  MeasuredRows<T> own;
  if (work.other_begin < work.other_end) {
    bool first = true;
    Walk<T>(work, shared, [&](const StepPlace& at) {
      if (kClass == Class::kPlain && first) own.Load(shared);
      first = false;
#pragma unroll 1
      for (int row = 0; row < T::kOther; row += T::kStep) {
        MeasureStep<T, Element, kClass>(params, work, shared,
                                        {at.head, at.other + row, row, at.stage}, unit, own, rows);
      }
    });
  }
#pragma unroll
  for (int r = 0; r < 2 * T::kSlices; ++r) {
    rows[r].AddLane(1, unit.unit);
    rows[r].AddLane(2, unit.unit);
    const int i = OwnRow<T>(work, r / 2, r % 2);
    if (threadIdx.x % 4 != 0 || i >= work.own_length) continue;
    const Measured how = MeasuredOf(pass, s, work.b, work.head, i);
    if (how == Measured::kNothing) continue;
    StoreMeasured(pass, s, work.b, work.head, i, rows[r], how, unit.unit, unit.sign);
  }
}

// Blocks loop over tiles. Items without rows to measure, which is most of them, cost nothing.
template <class T, class Element, Class kClass, int kCount>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    MeasureSm80(const __grid_constant__ LaunchList<MmaParams, kCount> list) {
  extern __shared__ __align__(128) char shared[];
  __shared__ MmaWork work;
  for (uint32_t block = blockIdx.x; block < list.blocks; block += gridDim.x) {
    const MmaParams& params = list.Of(block);
    if (!HasMeasured(params.pass)) {
      if (kCount == 1) return;
      continue;
    }
    __syncthreads();  // shared memory of the previous tile is free
    if (threadIdx.x == 0) SetUp<T>(params, block, work);
    __syncthreads();
    MeasureTile<T, Element, kClass>(params, work, shared);
  }
}

}  // namespace attend::cuda::backward
