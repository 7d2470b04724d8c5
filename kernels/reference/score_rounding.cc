// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/score_rounding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);
constexpr double kSmallestSubnormal = 0x1p-149;

// fp32 rounds larger values to Inf.
constexpr double kOverflow = 0x1.ffffffp127;

// Roundings of a score in addition to those of q.k: see the header.
constexpr double kTermRoundings = 4;
constexpr double kTanhRoundings = 8;
// Roundings of q.k per element if Tensor Cores accumulate it.
constexpr double kTruncations = 1.0 / 8;

// If some key's weight may become exp(kOpen) times the largest, the row's weights are unknown;
// below that no sum over keys overflows.
constexpr double kOpen = 100;

// Weights are at least the smallest normal number, so a smaller K carries no information.
constexpr double kKeptMin = 1e-290;

// Roundings of the three sums behind a spread, in addition to one per key.
constexpr double kSpreadRoundings = 8;

// If an element of the query, or its product with the scale, is below this, products with K may
// lose bits that matter.
constexpr double kTinyQuery = 0x1p-100;

// Kernels may flush fp32 subnormals to 0.
constexpr double kSmallestNormal = 0x1p-126;
// fp16 weights lose bits below the first, at most the second.
constexpr double kSmallestNormalHalf = 0x1p-14;
constexpr double kLargestLostHalf = 0x1p-25;

// Keys with smaller weights are lost, even all together, in fp32's rounding of the others.
constexpr double kCountingWeight = 0x1p-40;

}  // namespace

ScoreRounding::ScoreRounding(const Problem& problem, const double* q) : p_(problem), q_(q) {
  const double dim = static_cast<double>(p_.dim);
  const double scale = std::abs(static_cast<double>(p_.scale));
  const double truncations = p_.dtype == DType::kFloat32 ? 0 : dim * kTruncations;
  dot_units_ = (2 + std::sqrt(dim) / 2 + truncations) * kRoundoff;
  tiny_query_ = std::any_of(q, q + p_.dim, [&](double x) {
    const double element = std::abs(x);
    return element != 0 && element * std::min(1.0, scale) < kTinyQuery;
  });
}

double ScoreRounding::DotError(double magnitude, const double* k) const {
  const double scale = std::abs(static_cast<double>(p_.scale));
  double error =
      dot_units_ * scale * magnitude + kSmallestSubnormal * scale * static_cast<double>(p_.dim);
  if (tiny_query_) {
    double keys = 0;
    for (int64_t d = 0; d < p_.dim; ++d) keys += std::abs(k[d]);
    error += kSmallestSubnormal * keys;
  }
  return error;
}

// The error that remains after the cap; Inf or -Inf (`high`, `low`) becomes the cap.
double ScoreRounding::CappedError(const ScoreTerms& terms, double error, bool high,
                                  bool low) const {
  const ScoreCap<double> cap{CapOf(p_).value};
  if (!cap.on()) return error;
  const double scaled = static_cast<double>(p_.scale) * terms.dot;
  const double top = high ? cap.value : cap.Apply(scaled + error);
  const double bottom = low ? -cap.value : cap.Apply(scaled - error);
  return std::max(top - terms.capped, terms.capped - bottom) +
         kTanhRoundings * kRoundoff * std::abs(terms.capped);
}

// From the sum and the magnitude, which cancel: a part below 2^-53 of the other is lost, though it
// might overflow. If overflow is impossible, so small a part does not matter; otherwise it is added
// up separately.
ScoreRounding::Parts ScoreRounding::PartsOf(const ScoreTerms& terms, const double* k) const {
  const double scale = std::abs(static_cast<double>(p_.scale));
  if (terms.magnitude * std::max(scale, 1.0) <= kOverflow) {
    return {(terms.magnitude + terms.dot) / 2, (terms.magnitude - terms.dot) / 2};
  }
  Parts parts;
  for (int64_t d = 0; d < p_.dim; ++d) {
    const double product = q_[d] * k[d];
    if (!std::isfinite(product)) continue;
    (product > 0 ? parts.up : parts.down) += std::abs(product);
  }
  return parts;
}

void ScoreRounding::Judge(const ScoreTerms& terms, const double* k, KeyScore* score) {
  const double scale = static_cast<double>(p_.scale);
  // An Inf element follows IEEE unless the other elements overflow.
  const bool special = !std::isfinite(terms.magnitude);
  Parts raw = PartsOf(terms, k);
  if (scale < 0) std::swap(raw.up, raw.down);
  const Parts scaled{std::abs(scale) * raw.up, std::abs(scale) * raw.down};
  bool high = std::max(raw.up, scaled.up) > kOverflow;
  bool low = std::max(raw.down, scaled.down) > kOverflow;
  if ((high && low) || ((high || low) && (scale == 0 || special))) may_overflow_ = true;
  score->error = special ? 0 : CappedError(terms, DotError(terms.magnitude, k), high, low);
  score->error += kTermRoundings * kRoundoff *
                  (std::abs(terms.capped) + std::abs(terms.bias) + std::abs(terms.penalty));

  // An infinite term decides the score, unless the others overflow in the opposite direction.
  const Parts product = CapOf(p_).on() || special
                            ? Parts{std::max(terms.capped, 0.0), std::max(-terms.capped, 0.0)}
                            : scaled;
  const double up = product.up + std::max(terms.bias, 0.0) + std::max(-terms.penalty, 0.0);
  const double down = product.down + std::max(-terms.bias, 0.0) + std::max(terms.penalty, 0.0);
  if (CapOf(p_).on()) high = low = false;
  high = high || up > kOverflow;
  low = low || down > kOverflow;
  if (high && score->value < kInfinity) may_overflow_ = true;
  score->may_vanish = low;
}

RoundingSums::RoundingSums(const Problem& problem, double max, double highest, int64_t keys,
                           RowRounding* row)
    : p_(problem),
      max_(max),
      highest_(highest),
      open_(highest - max > kOpen),  // an overflowing row is NaN, and its sums carry no information
      tiny_weight_(kSmallestNormal * static_cast<double>(std::max<int64_t>(keys, 1))),
      lowest_(-kInfinity),
      row_(row) {}

// exp(value - max) * (exp(error) - 1), without intermediate overflow.
double RoundingSums::Raised(double value, double error, double max) const {
  return std::exp(value + error - max) * -std::expm1(-error);
}

void RoundingSums::Add(const KeyScore& score, double weight, const double* v) {
  // Two terms of the expansion suffice up to here, where nearly all errors are.
  constexpr double kSmall = 0x1p-10;
  const bool small = score.error <= kSmall;
  double raised = open_   ? 0
                  : small ? weight * score.error * (1 + score.error)
                          : Raised(score.value, score.error, max_);
  if (score.may_vanish && !open_) raised = std::max(raised, weight);
  if (!score.may_vanish) {
    kept_ += small ? weight * (1 - score.error) : std::exp(score.value - score.error - max_);
    lowest_ = std::max(lowest_, score.value - score.error);
  }
  row_->some_vanish = row_->some_vanish || score.may_vanish;
  raised_ += raised;
  for (int64_t d = 0; d < p_.dim_v; ++d) {
    const double value = v[d];
    row_->o[d] += weight * std::abs(value);
    first_[d] += raised * value;
    second_[d] += raised * value * value;
  }
  for (int64_t d = 0; p_.dropout > 0 && d < p_.dim_v; ++d) sizes_[d] += raised * std::abs(v[d]);
  ++row_->keys;
  if (weight >= kCountingWeight) ++row_->counting_keys;
  const bool half_weights = p_.dtype == DType::kFloat16 && row_->weights_rounded;
  const double half = half_weights ? kSmallestNormalHalf : 0;
  if (weight >= std::max(half, tiny_weight_)) return;
  const double lost_half = weight < half ? std::min(weight, kLargestLostHalf) : 0;
  const double lost =
      weight < tiny_weight_ ? std::min(weight, kSmallestNormal) + kSmallestSubnormal : 0;
  for (int64_t d = 0; d < p_.dim_v; ++d) {
    const double value = std::abs(v[d]);
    lost_halves_[d] += lost_half * value;
    row_->lost[d] += lost * value;
  }
}

void RoundingSums::Finish(double sum, double sink, const double* o) {
  if (!std::isfinite(sum) || std::isnan(sink) || sink == kInfinity) return;
  const double top = std::max(max_, sink);
  if (top == -kInfinity) return;
  const double shrink = std::exp(max_ - top);
  const double sink_error = sink == -kInfinity ? 0 : kTermRoundings * kRoundoff * std::abs(sink);
  const bool has_sink = sink != -kInfinity;
  const double sink_raised = has_sink ? Raised(sink, sink_error, top) : 0;
  const bool open = open_ || sink_raised > std::exp(kOpen);
  const double all = shrink * sum + (has_sink ? std::exp(sink - top) : 0);
  const double raised = shrink * raised_ + sink_raised;
  const double kept = shrink * kept_ + (has_sink ? std::exp(sink - sink_error - top) : 0);
  const double sum_error = (kSpreadRoundings + static_cast<double>(row_->keys)) * 0x1p-53;
  for (int64_t d = 0; d < p_.dim_v; ++d) {
    // A kernel's last factor, 1 / sum, may be subnormal if a sink has nearly all of the weight.
    row_->lost[d] += kSmallestNormal * row_->o[d] + lost_halves_[d] * shrink / all;
    row_->o[d] *= shrink / all;
    const double squares = shrink * second_[d] + o[d] * o[d] * raised;
    const double spread = std::max(0.0, squares - 2 * o[d] * shrink * first_[d]);
    row_->moved[d] = std::sqrt(raised * (spread + sum_error * squares)) / kept;
    if (p_.dropout > 0) {
      const double sizes = shrink * sizes_[d] + std::abs(o[d]) * raised;
      row_->moved[d] = std::min(row_->moved[d], sizes / kept);
    }
    if (open || kept < kKeptMin) row_->moved[d] = kInfinity;
  }
  if (has_sink) lowest_ = std::max(lowest_, sink - sink_error);
  row_->all_vanish = lowest_ == -kInfinity;
  const double keys = static_cast<double>(row_->keys + 1);
  const double highest = std::max(highest_, has_sink ? sink + sink_error : -kInfinity);
  row_->lse_up = open ? highest - top + std::log(keys) : std::log1p(raised / all);
  row_->lse_down =
      kept < kKeptMin ? top + std::log(all) - lowest_ : std::max(0.0, std::log(all / kept));
}

}  // namespace attend
