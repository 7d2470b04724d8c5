// SPDX-License-Identifier: Apache-2.0
//
// Measured rows: rows whose terms, or delta alone, are not taken from LSE and O but added up over
// their keys, from the same scores as the gradients use. Then weights sum to 1 however large scores
// are, and delta is free of O's rounding. Device code.

#pragma once

#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// Sums over some keys of a row. `unit`: log2 of the weight per unit of score; positive.
struct RowMeasure {
  float most = NegativeInfinity();  // largest score
  float sum = 0.0f;                 // of weights 2^((score - most) unit)
  float delta = 0.0f;               // sum of weights times dP

  // Factor of the sums if `above` becomes the largest score.
  __device__ __forceinline__ float Factor(float above, float unit) const {
    return most == NegativeInfinity() ? 0.0f : FastExp2(RoundedDifference(most, above) * unit);
  }
  // Raises the largest score if `score` is larger. NaN raises nothing.
  __device__ __forceinline__ void Raise(float score, float unit) {
    if (!(score > most)) return;
    const float factor = Factor(score, unit);
    most = score;
    sum *= factor;
    delta *= factor;
  }
  // Adds a key; Raise must have seen its score. A key that does not count has score -inf and a
  // finite dP.
  __device__ __forceinline__ void Add(float score, float d_weight, float unit) {
    const float weight = FastExp2(RoundedDifference(score, ReferenceOf(most)) * unit);
    sum += weight;
    delta = fmaf(weight, d_weight, delta);
  }
  // Adds the sums of the lane `distance` away, which has other keys of the row.
  __device__ __forceinline__ void AddLane(int distance, float unit) {
    const float theirs = __shfl_xor_sync(0xffffffffu, most, distance);
    const float above = fmaxf(most, theirs);
    const float factor = Factor(above, unit);
    sum *= factor;
    delta *= factor;
    most = above;
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    delta += __shfl_xor_sync(0xffffffffu, delta, distance);
  }
};

// How much of a row is measured: only delta where O's rounding spoils it.
enum class Measured { kNothing, kDelta, kAll };
__device__ __forceinline__ Measured MeasuredOf(const BackwardPass& pass, const Sequence& s,
                                               int64_t b, int64_t h, int64_t i) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const float lse = a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i];
  if (IsMeasured(p, lse)) return Measured::kAll;
  const bool doubted = pass.doubt != nullptr && pass.doubt[TermIndex(p, s, b, h, i)] != 0.0f;
  return doubted ? Measured::kDelta : Measured::kNothing;
}
// Whether one of the rows [begin, end) needs measuring. All threads of a block.
__device__ __forceinline__ bool IsAnyMeasured(const BackwardPass& pass, const Sequence& s,
                                              int64_t b, int64_t h, int64_t begin, int64_t end) {
  bool any = false;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    any = any || MeasuredOf(pass, s, b, h, i) != Measured::kNothing;
  }
  return __syncthreads_or(any) != 0;
}

// Stores the terms of row i, or the part that is measured, from the sums of all its keys. `sign`:
// the factor that scores were multiplied by.
__device__ __forceinline__ void StoreMeasured(const BackwardPass& pass, const Sequence& s,
                                              int64_t b, int64_t h, int64_t i,
                                              const RowMeasure& row, Measured how, float unit,
                                              float sign) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const double shift = static_cast<double>(row.most) * static_cast<double>(unit);
  double base = log2(static_cast<double>(row.sum));
  if (p.has_sinks) {
    const double sink = SinkAbove(a.sinks[h], shift);
    const double most = fmax(base, sink);
    base = most + log2(exp2(base - most) + exp2(sink - most));
  }
  const int64_t term = TermIndex(p, s, b, h, i);
  const float d_lse =
      pass.gradients.d_lse == nullptr
          ? 0.0f
          : pass.gradients.d_lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i];
  // A row without keys has no weights.
  const bool none = row.most == NegativeInfinity();
  if (isnan(row.sum) || NonFinite(row.delta)) pass.flags->special = 1;
  const double delta = none ? 0.0 : static_cast<double>(row.delta) * exp2(-base);
  pass.less[term] = static_cast<float>(delta) - d_lse;
  if (how == Measured::kDelta) return;
  // cuda_flash_sm90 has no shifts of capped scores, which are bounded.
  const bool shifted =
      fabs(shift + base) > kShiftedLse && !(CapOf(p).on() && pass.lse_unit == kLog2E);
  if (!shifted) base += shift;
  const double in_units = pass.lse_unit == kLog2E ? base : base * 0.6931471805599453;
  pass.lse[term] = none ? INFINITY : static_cast<float>(in_units);
  // A row may be measured twice, and need a shift only once.
  pass.shift[term] = none || !shifted ? 0.0f : row.most * sign;
  if (!none && shifted) pass.flags->shifted = 1;
}

}  // namespace attend::cuda
