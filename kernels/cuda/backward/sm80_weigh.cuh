// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by mma.sync between its products: P and dS from scores and dP. Device code; all
// lanes of a warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/backward/sm80_dropout.cuh"
#include "kernels/cuda/backward/sm80_tile.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/ptx/tanh.cuh"

namespace attend::cuda::backward {

// Terms of the thread's own query rows: row 2 * slice + half has fragment elements 2 * half and the
// next.
template <class T>
struct OwnTerms {
  float lse[2 * T::kSlices], less[2 * T::kSlices];
};

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

// How much of the others' rows [other, other + count) the warp's rows see.
enum class Sight { kNone, kSome, kAll };
template <class T>
__device__ __forceinline__ Sight SightOf(const MmaWork& work, int other, int count) {
  const int first = work.begin + static_cast<int>(threadIdx.x) / 32 / T::kShare * T::kWarpRows;
  const int last = min(first + T::kWarpRows, work.own_length) - 1;
  if (first > last || other + count <= SeenBegin<T>(work.band, first) ||
      other >= SeenEnd<T>(work.band, last)) {
    return Sight::kNone;
  }
  const bool all =
      other >= SeenBegin<T>(work.band, last) && other + count <= SeenEnd<T>(work.band, first);
  return all ? Sight::kAll : Sight::kSome;
}

// Sets the weight, or score, of pairs that do not see each other to `hidden`. `other`: the thread's
// first.
template <class T>
__device__ __forceinline__ void HidePairs(const MmaWork& work, int other, StepSums<T>& weights,
                                          float hidden = 0.0f) {
#pragma unroll
  for (int r = 0; r < 2 * T::kSlices; ++r) {
    const int row = OwnRow<T>(work, r / 2, r % 2);
    const int begin = SeenBegin<T>(work.band, row) - other;
    const int end = SeenEnd<T>(work.band, row) - other;
#pragma unroll
    for (int n = 0; n < T::kStepBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < begin || 8 * n + e >= end) weights[r / 2][n][r % 2 * 2 + e] = hidden;
      }
    }
  }
}

struct PairTerms {
  float lse, less;
};

// A pair's terms; if others are query rows, from eight rows' terms in shared memory.
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
  if constexpr (T::kOwnsKeys) terms += ThreadIndex() % 4 * 2;
#pragma unroll
  for (int n = 0; n < T::kStepBlocks; ++n) {
    float2 lse = {}, less = {};
    if constexpr (T::kOwnsKeys) {
      const float* const mine = terms + 8 * n;
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

// Subtracts each row's shift from its scores. `head`: index among those walked.
template <class T>
__device__ __forceinline__ void ShiftPairs(const MmaWork& work, int head, int other,
                                           StepSums<T>& s) {
  const float* const shift = work.shift + head * work.terms;
  const int rows = T::kOwnsKeys ? work.other_length : work.own_length;
  ForPairs<T>({}, nullptr, [&](int n, int r, int e, PairTerms) {
    const int row = T::kOwnsKeys ? other + 8 * n + e : OwnRow<T>(work, r / 2, r % 2);
    float& score = s[r / 2][n][r % 2 * 2 + e];
    if (row < rows) score = RoundedDifference(score, shift[row]);
  });
}

// Turns scores and dP into P and dS, in place, without score terms.
template <class T>
__device__ __forceinline__ void WeighPlain(const MmaWork& work, int head, Sight sight, int other,
                                           const OwnTerms<T>& own, const float* terms,
                                           StepSums<T>& s, StepSums<T>& d_p) {
  if (work.shifted) ShiftPairs<T>(work, head, other, s);
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
    float& weight = s[r / 2][n][r % 2 * 2 + e];
    weight = FastExp2(fmaf(weight, work.to_log2, -pair.lse));
  });
  if (sight == Sight::kSome) HidePairs<T>(work, other, s);
  if constexpr (T::kWantsFirst) {
    ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
      float& d_score = d_p[r / 2][n][r % 2 * 2 + e];
      d_score = s[r / 2][n][r % 2 * 2 + e] * (d_score - pair.less);
    });
  }
}

// Turns products into factor * q.k, capped, and dP, unless it is measured, into dS without its
// weight.
template <class T>
__device__ __forceinline__ void ScaleAndCap(const Problem& p, float factor, const OwnTerms<T>& own,
                                            const float* terms, StepSums<T>& s, StepSums<T>& d_p) {
  constexpr bool kDifferentiates = T::kWantsFirst && !T::kMeasures;
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
    float& score = s[r / 2][n][r % 2 * 2 + e];
    score = RoundedProduct(score, factor);
    if constexpr (kDifferentiates) d_p[r / 2][n][r % 2 * 2 + e] -= pair.less;
  });
  if (p.softcap == 0.0f) return;
  const float inverse_cap = 1.0f / p.softcap;
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms) {
    float& score = s[r / 2][n][r % 2 * 2 + e];
    const float share = AccurateTanh(score * inverse_cap);
    score = p.softcap * share;
    if constexpr (kDifferentiates) d_p[r / 2][n][r % 2 * 2 + e] *= fmaf(-share, share, 1.0f);
  });
}

// Loads the pairs' bias; 0 where there is none. `from`: row 0's; rows are `stride` elements apart,
// or bytes for bits. `other`: the thread's first.
template <class T, class Element>
__device__ __forceinline__ void LoadBias(const MmaWork& work, const Element* from, int64_t stride,
                                         int other, StepSums<T>& bias) {
  const int first = OwnRow<T>(work, 0, 0);
  const int owned = work.own_length - first;
  const int others = work.other_length - other;
  ForPairs<T>({}, nullptr, [&](int n, int r, int e, PairTerms) {
    const int mine = first + 8 * r;
    const int at = 8 * n + e;
    float& x = bias[r / 2][n][r % 2 * 2 + e];
    x = 0.0f;
    if (8 * r >= owned || at >= others) return;
    const int row = T::kOwnsKeys ? other + at : mine;
    const int key = T::kOwnsKeys ? mine : other + at;
    if constexpr (sizeof(Element) == 1) {
      const uint32_t eight = from[row * stride + key / 8];
      if ((eight >> (key & 7) & 1u) == 0) x = NegativeInfinity();
    } else if constexpr (sizeof(Element) == 2) {
      x = __uint_as_float(from[row * stride + key]);
    } else {
      x = from[row * stride + key];
    }
  });
}

// Starts loading what AddBias adds, so that products hide the latency. 16-bit types stay packed.
template <class T>
__device__ __forceinline__ void LoadBias(const MmaWork& work, const BiasView& view, int head,
                                         int other, StepSums<T>& bias) {
  const int64_t at = work.b * view.stride_b + head * view.stride_h;
  const int64_t stride = view.stride_q;
  if (view.dtype == DType::kFloat32) {
    LoadBias<T>(work, static_cast<const float*>(view.data) + at, stride, other, bias);
  } else if (view.dtype == DType::kBit) {
    LoadBias<T>(work, static_cast<const uint8_t*>(view.data) + at / 8, stride / 8, other, bias);
  } else {
    LoadBias<T>(work, static_cast<const uint16_t*>(view.data) + at, stride, other, bias);
  }
}

template <class T>
__device__ __forceinline__ void AddBias(DType dtype, const StepSums<T>& bias, StepSums<T>& s) {
  const bool sixteen = DTypeBytes(dtype) == 2;
  ForPairs<T>({}, nullptr, [&](int n, int r, int e, PairTerms) {
    const float x = bias[r / 2][n][r % 2 * 2 + e];
    const auto bits = static_cast<uint16_t>(__float_as_uint(x));
    s[r / 2][n][r % 2 * 2 + e] += sixteen ? Widen(dtype, bits) : x;
  });
}

template <class T>
__device__ __forceinline__ void AddAlibi(const MmaWork& work, float slope, int other,
                                         const OwnTerms<T>& own, const float* terms,
                                         StepSums<T>& s) {
  const int apart = other - OwnRow<T>(work, 0, 0) - (T::kOwnsKeys ? -work.offset : work.offset);
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms) {
    const int distance = apart + 8 * (n - r) + e;  // or its negative
    s[r / 2][n][r % 2 * 2 + e] -= slope * fabsf(static_cast<float>(distance));
  });
}

// Sets to -inf the scores of pairs that a mask's bits remove.
template <class T>
__device__ __forceinline__ void RemovePairs(const StepSums<T>& bias, StepSums<T>& s) {
  ForPairs<T>({}, nullptr, [&](int n, int r, int e, PairTerms) {
    if (bias[r / 2][n][r % 2 * 2 + e] < 0.0f) s[r / 2][n][r % 2 * 2 + e] = NegativeInfinity();
  });
}

// Turns products into scores, with score terms in the order of problem.h, and dP into its value
// with dropout, as ScaleAndCap leaves it. Returns which pairs are kept.
template <class T, bool kDropout>
__device__ __forceinline__ uint32_t ScoreGeneral(const MmaWork& work, const Attention& a, int head,
                                                 int other, const OwnTerms<T>& own,
                                                 const float* terms, const StepSums<T>& bias,
                                                 StepSums<T>& s, StepSums<T>& d_p) {
  const Problem& p = a.problem;
  head += work.head;
  uint32_t kept = 0;
  if constexpr (kDropout) {
    kept = KeptPairs<T>(a, work, head, other);
    if constexpr (T::kWantsFirst) DropPairs<T>(kept, DropoutScale(p.dropout), d_p);
  }
  ScaleAndCap<T>(p, T::kMeasures ? work.factor : p.scale, own, terms, s, d_p);
  if (p.has_bias && !HasBits(a)) AddBias<T>(a.bias.dtype, bias, s);
  if (p.has_alibi) {
    AddAlibi<T>(work, a.alibi_slopes[work.b * a.alibi_stride_b + head], other, own, terms, s);
  }
  if (HasBits(a)) RemovePairs<T>(bias, s);
  return kept;
}

// Turns scores and dP into P and dS, in place, with score terms and dropout. `head`: index among
// those walked.
template <class T, bool kDropout>
__device__ __forceinline__ void WeighGeneral(const MmaWork& work, const Attention& a, int head,
                                             Sight sight, int other, const OwnTerms<T>& own,
                                             const float* terms, const StepSums<T>& bias,
                                             StepSums<T>& s, StepSums<T>& d_p) {
  const uint32_t kept = ScoreGeneral<T, kDropout>(work, a, head, other, own, terms, bias, s, d_p);
  if (work.shifted) ShiftPairs<T>(work, head, other, s);
  // Subtract first: a row's scores may be far from 0 (exponent_base.cuh).
  ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms pair) {
    float& weight = s[r / 2][n][r % 2 * 2 + e];
    weight = FastExp2(RoundedDifference(weight, pair.lse) * kLog2E);
  });
  if (sight == Sight::kSome) HidePairs<T>(work, other, s);
  if constexpr (T::kWantsFirst) {
    ForPairs<T>(own, terms, [&](int n, int r, int e, PairTerms) {
      d_p[r / 2][n][r % 2 * 2 + e] *= s[r / 2][n][r % 2 * 2 + e];
    });
  }
  if constexpr (kDropout && T::kWantsSecond) DropPairs<T>(kept, 1.0f, s);
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
