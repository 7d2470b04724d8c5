// SPDX-License-Identifier: Apache-2.0
//
// Bounds the effect of fp32's rounding on one row: first on its scores, then through their weights
// on O and LSE. check_rows.h says how an answer is judged by it; the reasoning is here.
//
// Scores. An fp32 kernel gets s_j + e_j for the score s_j of key j, with u fp32's unit roundoff and
//
//   |e_j| <= E_j = cap((2 + sqrt(D) / 2 + t) u |scale| sum |q||k|)
//                  + u (4 (|s'_j| + |bias| + |slope * distance|) + 8 |s'_j| if there is a cap)
//
// sqrt(D) / 2: D roundings of a dot product add up like a random walk (Higham & Mary 2019). t = D /
// 8 for 16-bit dtypes, else 0: Tensor Cores add 8 products (sm80) or 16 (sm90) to a sum at a time
// and always round towards zero (Fasi et al. 2021), which costs u on average and 2 u at most, and
// does not cancel. s'_j is the capped product; cap() is the error that the cap leaves: tanh at s_j
// damps it, to nothing where tanh is flat. The 4 are the sums, the factor log2(e) and the
// subtraction of the maximum. Products below fp32's normal numbers add 2^-149 each.
//
// Weights. With w_j = exp(s_j - max), S = sum w_j and o = sum w_j v_j / S, an O from the weights
// w_j exp(e_j) differs from o by sum w_j (exp(e_j) - 1)(v_j - o) / sum w_j exp(e_j): exactly, as
// sum w_j (v_j - o) = 0. So by Cauchy and Schwarz
//
//   |O - o| <= sqrt(R * sum R_j (v_j - o)^2) / K,   R_j = w_j (exp(E_j) - 1), R = sum R_j,
//                                                   K = sum w_j exp(-E_j)
//
// and LSE is within log(K / S) and log(1 + R / S) of the truth. A key counts only by what its
// weight can become: one at -1e9 beside one at 0 has R_j = 0, however far rounding moves its score,
// and a key whose v_j is o contributes nothing. A sink is a key with v = 0. Where R_j outgrows all
// bounds, as in a row whose keys are all at -1e9, fp32 does not determine the weights: O is some
// mean of V, and no more can be said (`moved` is infinite).
//
// With dropout v_j is m_j times the value (dropout.h): O is a mean of those. Many keys with weight
// then have v_j = 0, and o is small compared with the Cauchy-Schwarz bound. So the bound is the
// smaller of that and
//
//   |O - o| <= (sum R_j |v_j| + |o| R) / K
//
// The sum is computed as sum R_j v_j^2 - 2 o sum R_j v_j + o^2 R, which cancels: where one R_j is
// far larger than all others and its v_j is o, the others' contribution would be lost. So (8 + n)
// 2^-53 (sum R_j v_j^2 + o^2 R), the cost of n keys' roundings in double, is added.
//
// Small weights. fp16 has no normal number below 2^-14, and kernels round the weights w_j to it
// before they are divided by their sum: online softmax does not know the sum yet. Its running
// maximum may be less than the final one, and w_j larger than here, never smaller. So `lost` is
//
//   sum of min(w_j, 2^-25) |v_j| / S over the keys with w_j < 2^-14
//
// in fp16: nothing in a flat row, however long. In any dtype fp32's own limit is added to it,
// 2^-126 or so for each key about as small; there weights may have been divided first.
//
// Overflow. Scores in fp32's range are finite scores. Where a sum of the terms, taken in some
// order, may leave the range although double's does not, fp32 may have +Inf or NaN (`may_overflow`)
// or -Inf, which hides the key (`may_vanish`); K then excludes the key, and R_j is at least w_j.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/reference/score_terms.h"

namespace attend {

// One key's score and the E_j above.
struct KeyScore {
  double value = 0;
  double error = 0;
  bool may_vanish = false;
};

// The scores of one query row.
class ScoreRounding {
 public:
  // `q` must outlive this.
  ScoreRounding(const Problem& problem, const double* q);

  // Sets error and may_vanish of a score with these terms.
  void Judge(const ScoreTerms& terms, const double* k, KeyScore* score);

  bool may_overflow() const { return may_overflow_; }

 private:
  // Sums of the terms of one sign and of the other, which do not cancel.
  struct Parts {
    double up = 0;
    double down = 0;
  };

  Parts PartsOf(const ScoreTerms& terms, const double* k) const;
  double DotError(double magnitude, const double* k) const;
  double CappedError(const ScoreTerms& terms, double error, bool high, bool low) const;

  const Problem& p_;
  const double* q_;
  double dot_units_;  // roundings of scale * q.k relative to its magnitude
  bool tiny_query_;   // scale * q may be below fp32's normal numbers
  bool may_overflow_ = false;
};

// Bounds on the error of one row's O and LSE, from the scores' rounding alone.
struct RowRounding {
  bool weights_rounded = true;              // to the problem's dtype; set by the caller
  std::array<double, kHeadDimMax> o{};      // sum p|v|
  std::array<double, kHeadDimMax> moved{};  // bound on |O - o|; infinite: anywhere in V
  std::array<double, kHeadDimMax> lost{};   // loss from weights too small for the dtype
  double lse_up = 0;
  double lse_down = 0;
  int64_t keys = 0;           // number of keys with a weight
  int64_t counting_keys = 0;  // of those, with at least 2^-40 of the largest
  bool may_overflow = false;  // the row may be NaN in fp32
  bool some_vanish = false;   // some of its keys may be hidden in fp32
  bool all_vanish = false;    // all of them may be, so that fp32 sees no key
};

// Accumulates RowRounding key by key. `max` is the largest score, `highest` the largest score +
// error.
class RoundingSums {
 public:
  RoundingSums(const Problem& problem, double max, double highest, int64_t keys, RowRounding* row);

  // `weight` is exp(score - max), and `v` the value times dropout's factor.
  void Add(const KeyScore& score, double weight, const double* v);
  // `sum` is the weights' sum, `sink` the sink's logit or -inf, `o` the row's O.
  void Finish(double sum, double sink, const double* o);

 private:
  double Raised(double value, double error, double max) const;

  const Problem& p_;
  const double max_;
  const double highest_;
  const bool open_;  // some weight may outgrow all others by far: R is not needed
  const double tiny_weight_;
  double raised_ = 0;  // R
  double kept_ = 0;    // K
  double lowest_;      // largest score - error of a key that fp32 does not lose
  std::array<double, kHeadDimMax> first_{};   // sum R_j v_j
  std::array<double, kHeadDimMax> second_{};  // sum R_j v_j^2
  std::array<double, kHeadDimMax> sizes_{};   // sum R_j |v_j|, with dropout
  std::array<double, kHeadDimMax> lost_halves_{};
  RowRounding* row_;
};

}  // namespace attend
