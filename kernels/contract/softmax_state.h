// SPDX-License-Identifier: Apache-2.0
//
// The algebra of partial attention: the state of one output row after some of its keys. Every
// kernel's inner loop uses it, and so does merging partial answers over parts of the keys.
//
//   max  the largest score so far, -inf if none
//   sum  sum of exp(score - max)
//   o    sum of exp(score - max) * v, not yet divided by sum
//
// Merging is associative and commutative up to rounding, and the empty state is its identity.
// (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022.)

#pragma once

#include <cmath>
#include <limits>

#include "kernels/contract/portable.h"

namespace attend {

template <class Real>
struct SoftmaxState {
  Real max = -std::numeric_limits<Real>::infinity();
  Real sum = 0;
};

// The factors of each side's unnormalised output when two states are merged.
template <class Real>
struct MergeWeights {
  Real left;
  Real right;
};

// exp(value - max), but weight 0 rather than NaN if both are -inf. A NaN max stays NaN.
template <class Real>
ATTEND_HD inline Real ScaledExp(Real value, Real max) {
  if (value == -std::numeric_limits<Real>::infinity()) {
    return max != max ? max : Real(0);
  }
  return std::exp(value - max);
}

// Merges `right` into `left`; o_merged = weights.left * o_left + weights.right * o_right.
template <class Real>
ATTEND_HD inline MergeWeights<Real> Merge(SoftmaxState<Real>& left,
                                          const SoftmaxState<Real>& right) {
  // The maximum keeps NaN: a NaN score must reach the output, as IEEE requires.
  const Real max = (left.max > right.max || left.max != left.max) ? left.max : right.max;
  const MergeWeights<Real> weights{ScaledExp(left.max, max), ScaledExp(right.max, max)};
  left.sum = weights.left * left.sum + weights.right * right.sum;
  left.max = max;
  return weights;
}

// Adds one score; the new value's weight is weights.right (its own o is v itself).
template <class Real>
ATTEND_HD inline MergeWeights<Real> Add(SoftmaxState<Real>& state, Real score) {
  return Merge(state, SoftmaxState<Real>{score, Real(1)});
}

// Adds a logit that has no value vector (an attention sink): o is only rescaled.
template <class Real>
ATTEND_HD inline Real AddSink(SoftmaxState<Real>& state, Real logit) {
  return Add(state, logit).left;
}

// Natural-log log-sum-exp of the state; -inf if empty.
template <class Real>
ATTEND_HD inline Real LogSumExp(const SoftmaxState<Real>& state) {
  if (state.sum == Real(0)) return -std::numeric_limits<Real>::infinity();
  return state.max + std::log(state.sum);
}

// The final factor of the unnormalised output; 0 for the empty state.
template <class Real>
ATTEND_HD inline Real InverseSum(const SoftmaxState<Real>& state) {
  return state.sum == Real(0) ? Real(0) : Real(1) / state.sum;
}

}  // namespace attend
