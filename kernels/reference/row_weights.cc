// SPDX-License-Identifier: Apache-2.0
//
// A row's softmax is either computed from its keys (Whole: one online pass that also adds up R, K
// and the sums for delta's error), or taken from the given LSE and O (AsGiven), whose rounding is
// then part of the error. Whole rows are cached: every row of dK and dV asks for all rows that see
// it.

#include "kernels/reference/row_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/gradient_terms.h"
#include "kernels/reference/score_rounding.h"
#include "kernels/reference/score_terms.h"

namespace attend {
namespace {

constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Cost of a pair beside its products, in multiply-adds: exponentials etc.
constexpr double kPairWork = 128;
// Cache size in rows: a few MiB.
constexpr int64_t kRowsMost = 1 << 16;

// Keys for which one maximum norm is cached.
constexpr int64_t kBlock = 16;

// The contract of gradients.h: a row's weights sum to 1 within this, however large LSE is and
// whatever rounding it has lost. A row whose LSE alone leaves more open is computed whole.
constexpr double kNormError = 0x1p-10;

// Weights that may be off by a factor of 2 or more count as unknown.
constexpr double kLogErrorMost = 0.69;
// fp32 holds larger weights by less.
constexpr double kFiniteLog = 80;

// Roundings of a row's sum of weights beside those of the additions: see check_rows.h.
constexpr double kWeightRoundings = 8;

// Larger exponents carry no information: e^500 times anything is as good as infinite, and products
// with it stay finite.
constexpr double kExponentMost = 500;

double Norm(const RowElements& x, int64_t dim) {
  double sum = 0;
  for (size_t d = 0; d < static_cast<size_t>(dim); ++d) sum += x[d] * x[d];
  return std::sqrt(sum);
}

// A row's sums while keys are added, relative to the largest score so far (online softmax).
class RowSum {
 public:
  // `size` is the magnitude of the sum behind `d_weight`, both with dropout's factor.
  void Add(const KeyScore& score, double kept, double d_weight, double size) {
    ++keys_;
    Raise(score.value);
    const double weight = std::exp(score.value - max_);
    double raised = std::exp(std::min(score.value + score.error - max_, kExponentMost)) *
                    -std::expm1(-score.error);
    if (score.may_vanish) {
      raised = std::max(raised, weight);
    } else {
      least_ += std::exp(score.value - score.error - max_);
    }
    sum_ += weight;
    kept_ += weight * kept;
    delta_ += weight * d_weight;
    size_ += weight * size;
    raised_ += raised;
    raised_size_ += raised * std::abs(d_weight);
    raised_first_ += raised * d_weight;
    raised_second_ += raised * d_weight * d_weight;
    low_ = std::min(low_, d_weight);
    high_ = std::max(high_, d_weight);
  }

  // A sink is a key of value 0.
  void AddSink(double logit) {
    Add({.value = logit, .error = 4 * kRoundoff * std::abs(logit)}, 0, 0, 0);
    sink_ = std::exp(logit - max_);
  }

  int64_t keys() const { return keys_; }
  double max() const { return max_; }
  double inverse_sum() const { return sum_ == 0 ? 0 : 1 / sum_; }
  double lse() const { return max_ + std::log(sum_); }
  double delta() const { return delta_ / sum_; }
  double size() const { return size_ / sum_; }
  double kept() const { return kept_ / sum_; }
  double sink() const { return sink_ / sum_; }
  // How far the scores' rounding may move LSE.
  double Moved() const {
    const double down = least_ > 0 ? std::log(sum_ / least_) : kInfinity;
    return std::max(std::log1p(raised_ / sum_), std::max(0.0, down));
  }
  // How far it may move sum P dP. As in score_rounding.h for O, or by the sum of each key's own
  // movement, which is tighter where one key has nearly all weight and no dP; never further than
  // dP's range.
  double MovedDelta() const {
    const double d = delta();
    const double all = raised_second_ + d * d * raised_;
    const double spread = std::max(0.0, all - 2 * d * raised_first_) +
                          (8 + static_cast<double>(keys_)) * 0x1p-53 * all;
    const double moved =
        std::min(std::sqrt(raised_ * spread), raised_size_ + std::abs(d) * raised_) / least_;
    const double range = std::max(high_ - d, d - low_);
    return moved < range ? moved : range;
  }

 private:
  void Raise(double score) {
    if (score <= max_) return;  // NaN goes on, and makes the sums NaN
    const double by = std::exp(max_ - score);
    max_ = score;
    for (double* const sum : {&sum_, &kept_, &delta_, &size_, &least_, &raised_, &raised_first_,
                              &raised_second_, &raised_size_, &sink_}) {
      *sum *= by;
    }
  }

  int64_t keys_ = 0;
  double max_ = -kInfinity;
  double sum_ = 0, kept_ = 0, delta_ = 0, size_ = 0, sink_ = 0;
  double least_ = 0;   // K of score_rounding.h
  double raised_ = 0;  // R, and its sums with dP and dP^2
  double raised_first_ = 0, raised_second_ = 0, raised_size_ = 0;
  double low_ = kInfinity, high_ = -kInfinity;
};

}  // namespace

double SumRoundings(int64_t terms) {
  return (2 + std::sqrt(static_cast<double>(terms)) / 2) * kRoundoff;
}

double ShareError(double share, double log_error, double log_share) {
  // With a large error the other end of [0, 1] may be the nearer one.
  const double rise = log_error <= 1 ? share * std::expm1(log_error)
                                     : std::exp(std::min(0.0, log_share + log_error)) - share;
  const double error = log_error <= 1 ? rise : std::max(rise, share);
  return std::min(error, std::max(share, 1 - share)) + 4 * kRoundoff * share;
}

double SubnormalRoundings(int64_t terms) { return (1 + static_cast<double>(terms)) * 0x1p-150; }

Products Multiply(const RowElements& x, const RowElements& y, int64_t dim) {
  Products products;
  for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
    const double product = x[d] * y[d];
    products.sum += product;
    products.magnitude += std::abs(product);
  }
  return products;
}

void LoadRow(const ConstTensorView& view, DType dtype, int64_t dim, int64_t b, int64_t h,
             int64_t row, RowElements* out) {
  LoadElements(view.data, dtype, b * view.stride_b + h * view.stride_h + row * view.stride_l, dim,
               out->data());
}

GradientRows::GradientRows(const Attention& attention, const Gradients& gradients,
                           double work_budget, const StopFlag* stop)
    : a_(attention), g_(gradients), stop_(stop), budget_(work_budget) {
  const Problem& p = a_.problem;
  const int64_t rows = p.heads_q * (p.packed ? p.total_q : p.batch * p.len_q);
  const double work = PairWork() * static_cast<double>(rows) * static_cast<double>(p.len_k);
  all_whole_ = !HasPart(p) && rows <= kRowsMost && work <= work_budget;
}

double GradientRows::PairWork() const {
  return static_cast<double>(2 * (a_.problem.dim + a_.problem.dim_v)) + kPairWork;
}

double GradientRows::LargestKey(const GradientRow& row) {
  const Problem& p = a_.problem;
  const Sequence& s = row.sequence;
  std::vector<double>& norms = norms_[{row.id.b, row.id.h}];
  if (norms.empty() && s.k_len > 0) {
    norms.resize(static_cast<size_t>((s.k_len + kBlock - 1) / kBlock));
    const bool removes = HasBits(a_) && a_.bias.stride_q == 0;
    const int64_t bit = row.id.b * a_.bias.stride_b + row.id.h * a_.bias.stride_h;
    RowElements k;
    for (int64_t j = 0; j < s.k_len; ++j) {
      if (removes && LoadElementAsDouble(a_.bias.data, a_.bias.dtype, bit + j) < 0) continue;
      LoadRow(a_.k, p.dtype, p.dim, row.id.b, row.id.h / p.group(), s.k_row + j, &k);
      const double norm = Norm(k, p.dim);
      double& block = norms[static_cast<size_t>(j / kBlock)];
      // A row that sees NaN or Inf has no finite LSE, so its norm does not matter.
      if (std::isfinite(norm)) block = std::max(block, norm);
    }
  }
  const KeyRange visible = VisibleKeys(p.mask, s, row.id.i);
  if (visible.begin >= visible.end) return 0;
  return *std::max_element(norms.begin() + visible.begin / kBlock,
                           norms.begin() + (visible.end - 1) / kBlock + 1);
}

double GradientRows::LargestPenalty(const GradientRow& row) const {
  if (!a_.problem.has_alibi) return 0;
  const auto slope =
      std::abs(static_cast<double>(a_.alibi_slopes[row.id.b * a_.alibi_stride_b + row.id.h]));
  const KeyRange keys = VisibleKeys(a_.problem.mask, row.sequence, row.id.i);
  if (!std::isfinite(slope) || keys.begin >= keys.end) return 0;
  const int64_t diagonal = row.id.i + row.sequence.offset;
  return slope * static_cast<double>(
                     std::max(std::abs(keys.begin - diagonal), std::abs(keys.end - 1 - diagonal)));
}

RowWeights GradientRows::Whole(const GradientRow& row, const RowElements& o, double d_lse) const {
  const Problem& p = a_.problem;
  const Sequence& s = row.sequence;
  const int64_t kv_head = row.id.h / p.group();
  ScoreRounding rounding(p, row.q.data());
  RowSum sum;
  RowElements other;
  bool hides = false;  // a key whose score may be -inf in fp32 has a NaN or Inf
  const KeyRange keys = VisibleKeys(p.mask, s, row.id.i);
  for (int64_t j = keys.begin; j < keys.end && !Stopped(stop_); ++j) {
    LoadRow(a_.k, p.dtype, p.dim, row.id.b, kv_head, s.k_row + j, &other);
    const ScoreTerms terms = TermsOf(a_, s, row.id, j, row.q.data(), other.data());
    KeyScore score{.value = terms.capped + terms.bias - terms.penalty};
    rounding.Judge(terms, other.data(), &score);
    if (score.value == -kInfinity) continue;
    const double kept = DropoutFactor(a_, row.id, j);
    Products d_weight;
    if (kept != 0) {  // a dropped value may be NaN
      LoadRow(a_.v, p.dtype, p.dim_v, row.id.b, kv_head, s.k_row + j, &other);
      d_weight = Multiply(row.d_o, other, p.dim_v);
    }
    hides |= score.may_vanish && !std::isfinite(d_weight.sum);
    sum.Add(score, kept, kept * d_weight.sum, kept * d_weight.magnitude);
  }
  const double sink = p.has_sinks ? static_cast<double>(a_.sinks[row.id.h]) : -kInfinity;
  if (sink != -kInfinity) sum.AddSink(sink);
  RowWeights weights{.known = !rounding.may_overflow() && !hides};
  if (!weights.known) weights.kept = -1;
  if (sum.keys() == 0) return weights;
  const double lse = sum.lse();
  const int64_t at = row.id.b * a_.lse_stride_b + row.id.h * a_.lse_stride_h + s.q_row + row.id.i;
  const double lost = std::abs(static_cast<double>(a_.lse[at]) - lse);
  const double given = 4 * kRoundoff * std::abs(lse) + (std::isfinite(lost) ? lost : 0);
  const double moved = sum.Moved();
  const double sums =
      kRoundoff * (kWeightRoundings + std::sqrt(static_cast<double>(sum.keys())) / 2);
  weights.shift = sum.max();
  weights.inverse_sum = sum.inverse_sum();
  weights.log_error = moved + std::min(given, kNormError) + sums;
  weights.log_units = 2;
  weights.sink = sum.sink();
  weights.sink_error = ShareError(weights.sink, weights.log_error, std::log(weights.sink));
  weights.kept = weights.known ? sum.kept() : -1;
  // Dropout may keep all of the weight that moves, or none of it.
  const double kept_moved =
      p.dropout > 0 ? KeptFactor(p) * std::min(1.0, std::expm1(2 * moved)) : 0;
  weights.kept_error =
      std::min(given + 2 * moved, kNormError) + sums + kept_moved + weights.sink_error;
  const Products delta = Multiply(row.d_o, o, p.dim_v);
  weights.less = sum.delta() - d_lse;
  // A pass computes delta from the stored O, or sums P dP.
  const double summed = (SumRoundings(p.dim_v) + SumRoundings(sum.keys())) * sum.size();
  weights.less_error = std::abs(delta.sum - sum.delta()) +
                       std::max(SumRoundings(p.dim_v) * delta.magnitude, summed) +
                       kRoundoff * std::abs(weights.less);
  weights.less_moved = sum.MovedDelta();
  weights.less_size = delta.magnitude + std::abs(d_lse);
  return weights;
}

RowWeights GradientRows::AsGiven(const GradientRow& row, const RowElements& o, double d_lse) {
  const Problem& p = a_.problem;
  const int64_t at =
      row.id.b * a_.lse_stride_b + row.id.h * a_.lse_stride_h + row.sequence.q_row + row.id.i;
  const auto lse = static_cast<double>(a_.lse[at]);
  RowWeights weights{.given = true};
  const bool bits16 = p.dtype != DType::kFloat32;
  const double dot_units =
      SumRoundings(p.dim) + (bits16 ? static_cast<double>(p.dim) / 8 * kRoundoff : 0);
  const double largest_score =
      std::abs(static_cast<double>(p.scale)) * Norm(row.q, p.dim) * LargestKey(row);
  if (lse == -kInfinity) {
    // The row sees no key, or scores beyond fp32's range have vanished.
    weights.known = largest_score + LargestPenalty(row) < std::numeric_limits<float>::max();
    if (!weights.known) weights.kept = -1;
    return weights;
  }
  weights.shift = lse;
  weights.inverse_sum = 1;
  weights.log_error =
      (bits16 ? 12 : 8) * kRoundoff * (1 + std::abs(lse)) + dot_units * largest_score;
  weights.log_units = bits16 ? 4 : 2;
  // A dO of 0 makes 0 of all weights and values that are finite. Those of a part of the keys cannot
  // be computed again.
  const Products delta = Multiply(row.d_o, o, p.dim_v);
  const bool finite = delta.sum == 0 && (!HasPart(p) || weights.log_error < kFiniteLog);
  const bool nothing = d_lse == 0 && Norm(row.d_o, p.dim_v) == 0 && finite;
  weights.known = nothing || weights.log_error < kLogErrorMost;
  if (nothing) weights.inverse_sum = 0;
  const double sink = p.has_sinks ? static_cast<double>(a_.sinks[row.id.h]) : -kInfinity;
  weights.sink = std::exp(std::min(0.0, sink - lse));
  weights.sink_error = ShareError(weights.sink, weights.log_error, std::log(weights.sink));
  const bool may_overflow = largest_score > std::numeric_limits<float>::max();
  weights.kept = p.dropout > 0 || may_overflow ? -1 : 1 - weights.sink;
  weights.kept_error = kNormError + weights.sink_error;
  weights.less = delta.sum - d_lse;
  weights.less_error = (SumRoundings(p.dim_v) + 4 * UnitRoundoff(p.o_dtype())) * delta.magnitude +
                       kRoundoff * std::abs(weights.less);
  for (int64_t d = 0; d < p.dim_v; ++d) {
    weights.less_error +=
        4 * SubnormalStep(p.o_dtype()) * std::abs(row.d_o[static_cast<size_t>(d)]);
  }
  weights.less_size = delta.magnitude + std::abs(d_lse);
  return weights;
}

GradientRow GradientRows::Row(const RowId& id, bool whole) {
  const Problem& p = a_.problem;
  GradientRow row{.id = id, .sequence = SequenceOf(a_, id.b), .q = {}, .d_o = {}, .weights = {}};
  const int64_t at = row.sequence.q_row + id.i;
  LoadRow(a_.q, p.dtype, p.dim, id.b, id.h, at, &row.q);
  LoadRow(g_.d_o, p.o_dtype(), p.dim_v, id.b, id.h, at, &row.d_o);
  // A dense row number; strides of O may be 0 or overlap.
  const int64_t number =
      p.packed ? id.h * p.total_q + at - a_.q_offsets[0] : (id.b * p.heads_q + id.h) * p.len_q + at;
  if (const auto known = whole_.find(number); known != whole_.end()) {
    row.weights = known->second;
    return row;
  }
  RowElements o;
  LoadRow({a_.o.data, a_.o.stride_b, a_.o.stride_h, a_.o.stride_l}, p.o_dtype(), p.dim_v, id.b,
          id.h, at, &o);
  const int64_t lse = id.b * a_.lse_stride_b + id.h * a_.lse_stride_h + at;
  const double d_lse = g_.d_lse == nullptr ? 0 : static_cast<double>(g_.d_lse[lse]);
  if (HasPart(p) || (!all_whole_ && !whole)) {
    row.weights = AsGiven(row, o, d_lse);
    const double work = PairWork() * static_cast<double>(p.len_k);
    if (HasPart(p) || !(row.weights.log_error > kNormError) || work > budget_) return row;
    budget_ -= work;
  }
  row.weights = Whole(row, o, d_lse);
  if (static_cast<int64_t>(whole_.size()) < kRowsMost) whole_.emplace(number, row.weights);
  return row;
}

}  // namespace attend
