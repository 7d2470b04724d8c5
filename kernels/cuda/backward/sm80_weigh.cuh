// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by mma.sync between its products: P and dS of the scores and dP. Device code;
// all lanes of a warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/backward/sm80_tile.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace attend::cuda::backward {

// What products leave of one step: [slice][eight others][fragment, see MultiplyAdd].
template <class T>
using StepSums = float[T::kSlices][T::kStepBlocks][4];
// The same as the operand of the next product: [slice][eight others][half].
template <class T>
using StepPairs = uint32_t[T::kSlices][T::kStepBlocks][2];

// Terms of the thread's own query rows: row 2 * slice + half has fragment elements 2 * half and the
// next.
template <class T>
struct OwnTerms {
  float lse[2 * T::kSlices], less[2 * T::kSlices];
};

// The thread's owned row of half `half` of slice `slice`.
template <class T>
__device__ __forceinline__ int OwnRow(const MmaWork& work, int slice, int half) {
  const int thread = ThreadIndex();
  return work.begin + thread / 32 * T::kWarpRows + 16 * slice + 8 * half + thread % 32 / 4;
}

template <class T>
__device__ __forceinline__ void LoadOwnTerms(const MmaWork& work, OwnTerms<T>& terms) {
#pragma unroll
  for (int n = 0; n < 2 * T::kSlices; ++n) {
    const int row = OwnRow<T>(work, n / 2, n % 2);
    const bool exists = row < work.own_length;
    terms.lse[n] = exists ? work.lse[row] : INFINITY;
    terms.less[n] = exists ? work.less[row] : 0.0f;
  }
}

// Where the others' rows [other, other + T::kStep) are to what the warp owns.
enum class Sight { kNone, kSome, kAll };
template <class T>
__device__ __forceinline__ Sight SightOf(const MmaWork& work, int other) {
  const int first = work.begin + static_cast<int>(threadIdx.x) / 32 * T::kWarpRows;
  const int last = min(first + T::kWarpRows, work.own_length) - 1;
  if (first > last || other + T::kStep <= SeenBegin<T>(work.band, first) ||
      other >= SeenEnd<T>(work.band, last)) {
    return Sight::kNone;
  }
  const bool all =
      other >= SeenBegin<T>(work.band, last) && other + T::kStep <= SeenEnd<T>(work.band, first);
  return all ? Sight::kAll : Sight::kSome;
}

// Takes the weights of pairs that do not see each other. `other`: the thread's first.
template <class T>
__device__ __forceinline__ void HidePairs(const MmaWork& work, int other, StepSums<T>& weights) {
#pragma unroll
  for (int r = 0; r < 2 * T::kSlices; ++r) {
    const int row = OwnRow<T>(work, r / 2, r % 2);
    const int begin = SeenBegin<T>(work.band, row) - other;
    const int end = SeenEnd<T>(work.band, row) - other;
#pragma unroll
    for (int n = 0; n < T::kStepBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < begin || 8 * n + e >= end) weights[r / 2][n][r % 2 * 2 + e] = 0.0f;
      }
    }
  }
}

struct PairTerms {
  float lse, less;
};

// The pair's terms if others are query rows: those of eight of them, in shared memory.
template <class T>
__device__ __forceinline__ PairTerms TermsOf(const OwnTerms<T>& own, const float2& lse,
                                             const float2& less, int r, int e) {
  if constexpr (T::kOwnsKeys) {
    return {e == 0 ? lse.x : lse.y, e == 0 ? less.x : less.y};
  } else {
    return {own.lse[r], own.less[r]};
  }
}

// `terms`: in shared memory, of the step's first other.
template <class T, class Visit>
__device__ __forceinline__ void ForPairs(const OwnTerms<T>& own, const float* terms, Visit visit) {
#pragma unroll
  for (int n = 0; n < T::kStepBlocks; ++n) {
    float2 lse = {}, less = {};
    if constexpr (T::kOwnsKeys) {
      const float* const mine = terms + 8 * n + ThreadIndex() % 4 * 2;
      lse = *reinterpret_cast<const float2*>(mine);
      less = *reinterpret_cast<const float2*>(mine + T::kOther);
    }
#pragma unroll
    for (int r = 0; r < 2 * T::kSlices; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) visit(n, r, e, TermsOf<T>(own, lse, less, r, e));
    }
  }
}

// Scores and dP become P and dS, in place. Without score terms.
template <class T>
__device__ __forceinline__ void WeighPlain(const MmaWork& work, const Problem& p, Sight sight,
                                           int other, const OwnTerms<T>& own, const float* terms,
                                           StepSums<T>& s, StepSums<T>& d_p) {
  const float to_log2 = p.scale * kLog2E;
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
    float& weight = s[r / 2][n][r % 2 * 2 + e];
    weight = FastExp2(fmaf(weight, to_log2, -pair.lse));
  });
  if (sight == Sight::kSome) HidePairs<T>(work, other, s);
  if constexpr (T::kWantsFirst) {
    ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
      float& d_score = d_p[r / 2][n][r % 2 * 2 + e];
      d_score = s[r / 2][n][r % 2 * 2 + e] * (d_score - pair.less);
    });
  }
}

// The terms of a score, in the order that problem.h gives.
struct ScoreTerms {
  const Attention& a;
  float inverse_cap, slope;
  int64_t bias;  // of row 0
  int offset;

  __device__ __forceinline__ ScoreTerms(const Attention& a, const MmaWork& work, int head)
      : a(a),
        inverse_cap(1.0f / a.problem.softcap),
        slope(a.problem.has_alibi ? a.alibi_slopes[work.b * a.alibi_stride_b + head] : 0.0f),
        bias(work.b * a.bias.stride_b + head * a.bias.stride_h),
        offset(work.offset) {}

  // What the softmax sees. `derivative`: of what softcap leaves.
  __device__ __forceinline__ float Of(float dot, int row, int key, float& derivative) const {
    const Problem& p = a.problem;
    float score = dot * p.scale;
    derivative = 1.0f;
    if (p.softcap > 0.0f) {
      const float share = tanhf(score * inverse_cap);
      score = p.softcap * share;
      derivative = fmaf(-share, share, 1.0f);
    }
    if (p.has_bias) {
      score += LoadGlobal(a.bias.data, a.bias.dtype, bias + row * a.bias.stride_q + key);
    }
    if (p.has_alibi) score -= slope * fabsf(static_cast<float>(key - row - offset));
    return score;
  }
};

// With score terms. Pairs that do not count leave 0, whatever else is.
template <class T>
__device__ __forceinline__ void WeighGeneral(const MmaWork& work, const Attention& a, int head,
                                             int other, const OwnTerms<T>& own, const float* terms,
                                             StepSums<T>& s, StepSums<T>& d_p) {
  const ScoreTerms score_terms(a, work, work.head + head);
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
    const int mine = OwnRow<T>(work, r / 2, r % 2);
    const int at = other + 8 * n + e;
    float& weight = s[r / 2][n][r % 2 * 2 + e];
    float& d_score = d_p[r / 2][n][r % 2 * 2 + e];
    if (mine >= work.own_length || at < SeenBegin<T>(work.band, mine) ||
        at >= SeenEnd<T>(work.band, mine)) {
      weight = d_score = 0.0f;
      return;
    }
    float derivative;
    const float score = T::kOwnsKeys ? score_terms.Of(weight, at, mine, derivative)
                                     : score_terms.Of(weight, mine, at, derivative);
    // The difference first: scores of a row may be far from 0 (exponent_base.cuh).
    weight = FastExp2(RoundedDifference(score, pair.lse) * kLog2E);
    d_score = weight * (d_score - pair.less) * derivative;
    if (score == NegativeInfinity()) weight = d_score = 0.0f;
  });
}

template <class T, class Element>
__device__ __forceinline__ void PackSums(const StepSums<T>& from, StepPairs<T>& to) {
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int n = 0; n < T::kStepBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[m][n][half] = Pack<Element>(from[m][n][2 * half], from[m][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace attend::cuda::backward
