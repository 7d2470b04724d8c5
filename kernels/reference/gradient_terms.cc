// SPDX-License-Identifier: Apache-2.0
//
// Error propagation through one (row, key) pair: score -> P -> dP -> dS -> dT, by the formulas in
// check_gradients.h. Errors from rounding (`error`) and from the row's uncertain weights (`moved`)
// are kept apart, because the latter cancel over a row: weights sum to 1.

#include "kernels/reference/gradient_terms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/score_rounding.h"
#include "kernels/reference/score_terms.h"

namespace attend {
namespace {

constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A weight that no kernel flushes to 0, not even in float16.
constexpr double kHeldByAll = 0x1p-20;

// Error of a factor of that magnitude if Tensor Cores take it in the problem's dtype: half a step,
// subnormal or relative.
double FactorRounding(DType dtype, bool rounded, double magnitude) {
  if (!rounded || dtype == DType::kFloat32 || dtype == DType::kFloat64) return 0;
  return UnitRoundoff(dtype) * magnitude + SubnormalStep(dtype);
}

}  // namespace

double SubnormalStep(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-149;
}

GradientPair PairOf(const Attention& a, const GradientRow& row, const GradientKey& key,
                    bool weights_rounded) {
  const Problem& p = a.problem;
  const RowWeights& w = row.weights;
  const ScoreTerms terms = TermsOf(a, row.sequence, row.id, key.j, row.q.data(), key.k.data());
  KeyScore score{.value = terms.capped + terms.bias - terms.penalty};
  GradientPair pair;
  if (score.value == -kInfinity || w.inverse_sum == 0) return pair;
  ScoreRounding(p, row.q.data()).Judge(terms, key.k.data(), &score);
  pair.counts = true;
  const double x = score.value - w.shift + std::log(w.inverse_sum);
  const double weight = std::exp(score.value - w.shift) * w.inverse_sum;
  const double off = score.error + w.log_error + w.log_units * kRoundoff * std::abs(x);
  const double moved = ShareError(weight, off, x);
  const double kept = DropoutFactor(a, row.id, key.j);
  pair.kept = kept != 0;
  const double kept_roundings = p.dropout > 0 ? 2 * kRoundoff : 0;
  const double most = weight + moved;  // upper bound of the weight
  const bool seen = !score.may_vanish && !(weight - moved <= kHeldByAll);
  pair.factor = {.value = kept * weight,
                 .error = kept * (FactorRounding(p.dtype, weights_rounded, most) +
                                  kept_roundings * most + 0x1p-126),
                 .moved = kept * moved,
                 .swing = kept,
                 .gross = kept * weight,
                 .carry = kept * most,
                 .seen = seen};

  // A dropped key's V may be NaN.
  const Products d_weight = pair.kept ? Multiply(row.d_o, key.v, p.dim_v) : Products{};
  const double m = kept * d_weight.sum - w.less;
  const double dot_error = (SumRoundings(p.dim_v) + kept_roundings) * d_weight.magnitude;
  const double m_error = kept * dot_error + w.less_error + kRoundoff * std::abs(m);
  const double size = kept * d_weight.magnitude + w.less_size;
  const double tiny = (1 + kept) * SubnormalRoundings(p.dim_v);
  const double m_most = std::abs(m) + m_error + w.less_moved;
  pair.d_score = {.value = weight * m,
                  .error = weight * m_error + most * tiny + 0x1p-126 * m_most +
                           2 * kRoundoff * std::abs(weight * m) + 0x1p-149,
                  .moved = moved * m_most + weight * w.less_moved,
                  .swing = m_most + w.less_moved / 2,
                  .gross = weight * size,
                  .reach = size,
                  .carry = most * size,
                  .seen = seen};
  double slope = 1, slope_error = 0;
  if (const ScoreCap<double> cap{CapOf(p).value}; cap.on()) {
    const double share = cap.Share(terms.capped);
    const double share_error = cap.Share(score.error);
    slope = 1 - share * share;
    slope_error = std::min(1.0, (2 + share_error) * share_error) + 4 * kRoundoff;
  }
  const double scale = static_cast<double>(p.scale);
  const double most_slope = slope + slope_error;
  const double by = std::abs(scale) * most_slope;
  const GradientTerm& s = pair.d_score;
  const double rounding = FactorRounding(p.dtype, weights_rounded,
                                         most_slope * (std::abs(s.value) + s.error + s.moved));
  pair.d_dot = {.value = scale * slope * s.value,
                .error = by * s.error + std::abs(scale) * rounding +
                         std::abs(scale * s.value) * (slope_error + 2 * kRoundoff * slope) +
                         std::max(1.0, std::abs(scale)) * 0x1p-150,
                .moved = by * s.moved,
                .swing = by * s.swing,
                .gross = by * s.gross,
                .reach = std::max(1.0, std::abs(scale)) * s.reach,
                .carry = std::max(1.0, std::abs(scale)) * s.carry,
                .seen = seen};
  return pair;
}

GradientSums::GradientSums(int64_t dim, double factor, bool one_row)
    : dim_(static_cast<size_t>(dim)), factor_(std::max(1.0, factor)), one_row_(one_row) {}

void GradientSums::Add(const RowElements& by, const GradientTerm& term) {
  ++terms_;
  reach_ = std::max(reach_, term.reach);
  double size = 0;
  for (size_t d = 0; d < dim_; ++d) {
    const double each = std::abs(by[d]);
    const double value = term.value * by[d];
    value_[d] += value;
    special_[d] = special_[d] || (term.seen && !std::isfinite(value));
    magnitude_[d] += std::abs(term.value) * each;
    error_[d] += term.error * each;
    carry_[d] += term.carry * each;
    moved_[d] += term.moved * each;
    swing_[d] = std::max(swing_[d], term.swing * each);
    size += each;
  }
  moved_all_ += term.moved * size;
  gross_all_ += term.gross * size;
}

double GradientSums::Bound(size_t d, DType dtype) const {
  // A row's weights sum to 1: where some grow, others shrink, by 2 in total.
  const double moved = one_row_ ? std::min(moved_[d], 2 * swing_[d]) : moved_[d];
  double bound = error_[d] + moved + SumRoundings(terms_) * magnitude_[d];
  // The sums of errors so far are themselves rounded.
  bound += kRoundoff * (std::abs(value_[d]) + bound);
  if (value_[d] == 0 && bound == 0) return 0;
  bound += factor_ * SubnormalRoundings(terms_);
  return bound + UnitRoundoff(dtype) * (std::abs(value_[d]) + bound) + SubnormalStep(dtype);
}

bool GradientSums::Open(DType dtype) const {
  const double step = static_cast<double>(dim_) * SubnormalStep(dtype);
  return moved_all_ > step && moved_all_ >= gross_all_;
}

}  // namespace attend
