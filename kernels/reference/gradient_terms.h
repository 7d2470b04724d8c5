// SPDX-License-Identifier: Apache-2.0
//
// The contribution of one query row and key to the backward pass, in double, with bounds on fp32's
// errors: the quantities of check_gradients.h. Host memory; calling thread.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/reference/row_weights.h"

namespace attend {

// A key and its value.
struct GradientKey {
  int64_t j = 0;
  RowElements k, v;
};

// One number, to be multiplied by a row and accumulated.
struct GradientTerm {
  double value = 0;
  double error = 0;  // from rounding, without `moved`
  double moved = 0;  // from the error of the row's weights
  double swing = 0;  // upper bound of moved: all of the row's weight moves to or from this key
  double gross = 0;  // magnitude of value if nothing cancelled
  double reach = 0;  // upper bound of what fp32 holds on the way to it, and
  double carry = 0;  // of it, without a scale that makes it smaller
  // The weight is NaN, or so large that no kernel flushes it to 0, and its score no -inf in fp32.
  bool seen = false;
};

struct GradientPair {
  bool counts = false;  // the key has a weight: its score is not -inf
  bool kept = true;     // dropout keeps it
  GradientTerm factor;  // of dO in dV: P times dropout's factor
  GradientTerm d_score;
  GradientTerm d_dot;  // dT * scale
};

// The key must be visible. `weights_rounded`: factors of 16-bit problems are rounded to their
// dtype, as Tensor Cores require.
GradientPair PairOf(const Attention& attention, const GradientRow& row, const GradientKey& key,
                    bool weights_rounded);

// Accumulates a row of a gradient.
class GradientSums {
 public:
  // The rounded sums may be multiplied by `factor`. `one_row`: all terms belong to one query row,
  // whose weights sum to 1.
  GradientSums(int64_t dim, double factor, bool one_row);

  void Add(const RowElements& by, const GradientTerm& term);
  void AddOne(const GradientTerm& term) { Add(kOne, term); }
  // Records that a row's weights are unknown, and so are the sums.
  void AddUnknown(const RowWeights& weights) {
    unknown_ = true;
    given_ = given_ || weights.given;
  }

  bool unknown() const { return unknown_; }
  // Whether such a row's weights came from its given LSE.
  bool given() const { return given_; }
  size_t dim() const { return dim_; }
  double value(size_t d) const { return value_[d]; }
  // Whether every kernel sees the NaN or Inf that makes the element NaN or Inf.
  bool special(size_t d) const { return special_[d]; }
  // Whether fp32 may leave its range on the way to an element, even if that is small.
  bool MayOverflow(size_t d) const { return !(std::max(reach_, carry_[d]) < 0x1.ffffffp127); }
  // The bound of an element, including its rounding to `dtype`.
  double Bound(size_t d, DType dtype) const;
  // Whether the weights leave 0.1 % of the row open.
  bool Wide() const { return unknown_ || moved_all_ > kWideShare * gross_all_; }
  // Whether they leave all of it open, so that 0 would be as good an answer. Considers known rows
  // only.
  bool Open(DType dtype) const;

 private:
  static constexpr double kWideShare = 0x1p-10;
  static constexpr RowElements kOne = {1};

  const size_t dim_;
  const double factor_;
  const bool one_row_;
  bool unknown_ = false, given_ = false;
  int64_t terms_ = 0;
  double moved_all_ = 0, gross_all_ = 0, reach_ = 0;
  RowElements value_{}, magnitude_{}, error_{}, moved_{}, swing_{}, carry_{};
  std::array<bool, kHeadDimMax> special_{};
};

// Half a subnormal step of 16-bit dtypes; fp32's whole step, 2^-149.
double SubnormalStep(DType dtype);

}  // namespace attend
