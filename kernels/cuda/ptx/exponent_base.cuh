// SPDX-License-Identifier: Apache-2.0
//
// The exponent's base: what the tile kernels subtract from scores, how it follows a row's maximum,
// and the arithmetic between a score and its weight, for any fp32 scores. Plain functions, for the
// device and the host, where tests run this same source.
//
// A weight is 2^(score * to_log2 - base), one fused multiply-add and an exp2. That is exact enough
// if base is, whose rounding all weights of a row share. But scores need not be small. At 2^24 a
// base is off by up to 1, at 1e10 by 512, and from 2.4e38 on it overflows fp32: a row fully masked
// with -1e10 or the lowest float would give 0 or Inf instead of a mean. Such a row is *far*. Its
// scores first have a reference, the row's largest score, subtracted exactly; the difference goes
// through the same multiply-add with a base that marks the row. That base is so low that any score
// makes the kernels examine the row (which they do anyway if a base is below -kBaseSlack), so the
// loops for ordinary rows do not pay for far ones.

#pragma once

#include <cmath>
#include <limits>

#include "kernels/contract/portable.h"
#include "kernels/contract/softmax_state.h"

namespace attend::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// In the Tensor Core kernels the base follows a row's maximum only when that has risen by more than
// this, in powers of two: weights up to 2^8 cost no accuracy in any dtype, and most tiles need no
// rescaling.
inline constexpr float kBaseSlack = 8.0f;

// Base of a row that has seen no key: any score raises it, and 2^(-inf - base) is 0.
inline constexpr float kNoBase = -3.0e38f;

// Base of a far row, a power of two below -kBaseSlack: its weights reach 2^9.
inline constexpr float kFarBase = -9.0f;
inline constexpr float kFarUnit = 0x1p-9f;

// A row is far beyond this: bases up to here are rounded by at most half a power of two.
inline constexpr float kNearBaseMax = 0x1p24f;

ATTEND_HD inline bool IsFar(float base) { return base == kFarBase; }

// Products and differences with a rounding of their own. The compiler would contract them into
// FMAs: the difference of two equal products would then be the rounding error instead of 0.
ATTEND_HD inline float RoundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
ATTEND_HD inline float RoundedDifference(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

// 2^x with about 2 ulp of error; 0 for results below 2^-126. NaN stays NaN, -inf gives +0. The host
// version is exp2 with the same flushing, so host tests show ranges and order of operations, not
// the device's last bits.
ATTEND_HD inline float FastExp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
#endif
}

ATTEND_HD inline float Weight(float score, float to_log2, float base) {
  return FastExp2(fmaf(score, to_log2, -base));
}

// A far row's score, ready for Weight with kFarBase: never +inf; -inf only if `score` is, so that
// no other key counts as masked.
ATTEND_HD inline float FarScore(float score, float reference) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const float difference = RoundedDifference(score, reference);
  return difference < kLowest && score >= kLowest ? kLowest : difference;
}

// Kernels without a bias meet far rows only if Q and K are huge. They mark such rows with a base
// that no score raises and that leaves no weight, do nothing else for them in their loops, and
// recompute them at the end (redo_rows.cuh).
inline constexpr float kMarkedBase = 3.0e38f;

// The base that `top`, a tile's largest score, raises a row's base to in those kernels; NaN if it
// is not finite.
ATTEND_HD inline float NearOrMarkedBase(float top, float to_log2) {
  const float product = RoundedProduct(top, to_log2);
  return fabsf(product) <= kNearBaseMax ? product : kMarkedBase + (top - top);
}

// New state of a row whose largest score in a tile raises its base.
struct RaisedBase {
  float base;
  float reference;  // if the row is far
  float rescale;    // factor of its sums and output so far
};

// `top` is the tile's largest score, not -inf; `reference` the row's, if it is far. NaN and Inf
// make the row NaN.
ATTEND_HD inline RaisedBase RaiseBase(float top, float base, float reference, float to_log2) {
  const float product = RoundedProduct(top, to_log2);
  if (!(top - top == 0.0f)) return {top - top, reference, top - top};
  RaisedBase raised{product, reference, 0.0f};
  const bool far = !(product <= kNearBaseMax && product >= -kNearBaseMax);
  if (far) {
    raised.base = kFarBase;
    raised.reference = top;
  } else if (IsFar(product)) {
    raised.base = kFarBase * (1 + 0x1p-23f);  // an ordinary base that must not equal the mark
  }
  if (base == kNoBase) return raised;
  if (IsFar(base)) {
    raised.rescale = far ? FastExp2(RoundedProduct(RoundedDifference(reference, top), to_log2))
                         : FastExp2(fmaf(reference, to_log2, kFarBase - raised.base));
  } else {
    raised.rescale =
        far ? FastExp2(fmaf(-top, to_log2, base) - kFarBase) : FastExp2(base - raised.base);
  }
  return raised;
}

// State of a row after all of its keys, in the units of problem.h.
struct FinishedRow {
  SoftmaxState<float> state;
  float unit = 1.0f;  // factor that makes its output fit state.sum
};

ATTEND_HD inline FinishedRow FinishBase(float base, float reference, float sum, float to_log2) {
  FinishedRow row;
  row.state.sum = sum;
  if (IsFar(base)) {
    row.state.max = reference * RoundedProduct(to_log2, kLn2);
    row.state.sum = sum * kFarUnit;
    row.unit = kFarUnit;
  } else if (base != kNoBase) {
    row.state.max = base * kLn2;
  }
  return row;
}

// Adds the sink, if any, to a row's state, and returns the factor of the row's output: 0 if it has
// seen no key, whatever the sink.
ATTEND_HD inline float OutputFactor(SoftmaxState<float>& state, float unit, bool has_sink,
                                    float sink) {
  const bool empty = state.sum == 0.0f;
  if (has_sink) unit *= AddSink(state, sink);
  return empty ? 0.0f : unit * InverseSum(state);
}

// For cuda_flash_fp32 and other kernels that follow the maximum exactly: subtract first, at the
// cost of one more addition. An empty row's reference is 0, which avoids NaN from -inf - -inf.
ATTEND_HD inline float ReferenceOf(float max) {
  return max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
}
ATTEND_HD inline float WeightAgainst(float score, float reference, float to_log2) {
  return FastExp2(RoundedProduct(RoundedDifference(score, reference), to_log2));
}

// Whether rows of cuda_flash_sm80 rise. `score` is an upper bound of the tile's scores and may be
// max(0, largest): the answer is then "maybe", and always yes before the first key and for far
// rows. NaN raises nothing: its own weight makes the row's sum NaN.
ATTEND_HD inline bool Outgrows(float score, float base, float to_log2) {
  return fmaf(score, to_log2, -base) > kBaseSlack;
}
// `top` is a tile's largest score.
ATTEND_HD inline bool RaisesSm80(float top, float base, float to_log2) {
  if (base == kNoBase) return top > -std::numeric_limits<float>::infinity();
  return Outgrows(top, base, to_log2);
}
ATTEND_HD inline bool RaisesSm80(float top, float base, float reference, float to_log2) {
  return IsFar(base) ? top > reference : RaisesSm80(top, base, to_log2);
}

// Likewise for cuda_flash_sm90, whose maxima propagate NaN.
ATTEND_HD inline bool MayRaiseSm90(float score, float base, float to_log2) {
  return !(RoundedProduct(score, to_log2) <= base + kBaseSlack);
}
ATTEND_HD inline bool RaisesSm90(float top, float base, float to_log2) {
  if (top == -std::numeric_limits<float>::infinity()) return false;
  return base == kNoBase || MayRaiseSm90(top, base, to_log2);
}

}  // namespace attend::cuda
