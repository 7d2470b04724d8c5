// SPDX-License-Identifier: Apache-2.0
//
// The effect of one query row on one key in the backward pass, in double, with how far off each
// number may be in fp32: the quantities of check_gradients.h. Host memory; calling thread.

#pragma once

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

// One number, to be multiplied with a row and added up.
struct GradientTerm {
  double value = 0;
  double error = 0;   // by rounding, beside the next
  double moved = 0;   // because the row's weights are off
  double swing = 0;   // moved, if all of the row's weight moved to or from this key
  double gross = 0;   // the magnitude of value, had nothing cancelled
  bool seen = false;  // the weight is NaN, or so large that no kernel takes it for 0
};

struct GradientPair {
  bool counts = false;  // the key has a weight, by its score
  bool kept = true;     // and dropout keeps it
  GradientTerm factor;  // of dO in dV: P, times dropout's factor
  GradientTerm d_score;
  GradientTerm d_dot;  // dT * scale
};

// The key must be visible. `weights_rounded`: factors of 16-bit problems are rounded to their
// dtype, as Tensor Cores need.
GradientPair PairOf(const Attention& attention, const GradientRow& row, const GradientKey& key,
                    bool weights_rounded);

// A row of a gradient while it is added up.
class GradientSums {
 public:
  // Once the sums are rounded they may be multiplied with `factor`. `one_row`: all terms are of one
  // query row, whose weights sum to 1.
  GradientSums(int64_t dim, double factor, bool one_row);

  void Add(const RowElements& by, const GradientTerm& term);
  void AddOne(const GradientTerm& term) { Add(kOne, term); }
  // Terms of a row of which nothing is known.
  void AddUnknown(const RowWeights& weights) {
    unknown_ = true;
    given_ = given_ || weights.given;
  }

  bool unknown() const { return unknown_; }
  // Because of the LSE that came with a row.
  bool given() const { return given_; }
  size_t dim() const { return dim_; }
  double value(size_t d) const { return value_[d]; }
  // Whether every kernel sees the NaN or Inf that makes the element NaN or Inf.
  bool special(size_t d) const { return special_[d]; }
  // The bound of an element, its rounding to `dtype` included.
  double Bound(size_t d, DType dtype) const;
  // Whether the weights leave 0.1 % of it open.
  bool Wide() const { return unknown_ || moved_all_ > kWideShare * gross_all_; }
  // Or all, so that 0 would be as good an answer. Of what is known.
  bool Open(DType dtype) const;

 private:
  static constexpr double kWideShare = 0x1p-10;
  static constexpr RowElements kOne = {1};

  const size_t dim_;
  const double factor_;
  const bool one_row_;
  bool unknown_ = false, given_ = false;
  int64_t terms_ = 0;
  double moved_all_ = 0, gross_all_ = 0;
  RowElements value_{}, magnitude_{}, error_{}, moved_{}, swing_{};
  std::array<bool, kHeadDimMax> special_{};
};

// Half a step between the dtype's subnormal numbers.
double SubnormalStep(DType dtype);

}  // namespace attend
