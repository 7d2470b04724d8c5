// SPDX-License-Identifier: Apache-2.0
//
// A row takes two passes over its keys: the first finds the largest score, the second adds up
// exp(score - max) * v. So nothing overflows, and no running rescale costs accuracy. Scores of the
// first kKeptScores keys are cached between the passes.

#include "kernels/reference/cpu_reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/contract/softmax_state.h"
#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/score_terms.h"
#include "kernels/reference/store_rounded.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The scores of one query row over its visible keys in order, any number of times.
class RowScores {
 public:
  RowScores(const Attention& a, const Sequence& s, const RowId& id, bool with_errors,
            const StopFlag* stop)
      : a_(a), s_(s), id_(id), stop_(stop) {
    if (id.i >= s.q_len) return;
    const Problem& p = a.problem;
    keys_ = VisibleKeys(p.mask, s, id.i);
    if (keys() == 0) return;
    const int64_t q = id.b * a.q.stride_b + id.h * a.q.stride_h + (s.q_row + id.i) * a.q.stride_l;
    LoadElements(a.q.data, p.dtype, q, p.dim, q_.data());
    if (with_errors) rounding_.emplace(p, q_.data());
    kept_.reserve(static_cast<size_t>(std::min(keys(), kKeptScores)));
  }

  int64_t keys() const { return std::max<int64_t>(0, keys_.end - keys_.begin); }
  bool may_overflow() const { return rounding_ && rounding_->may_overflow(); }

  // visit(key, score) for every key in order, until `stop` is set.
  template <class Visit>
  void ForEach(Visit visit) {
    for (int64_t j = keys_.begin; j < keys_.end && !Stopped(stop_); ++j) {
      const int64_t n = j - keys_.begin;
      if (n < static_cast<int64_t>(kept_.size())) {
        visit(j, kept_[static_cast<size_t>(n)]);
        continue;
      }
      const KeyScore score = Compute(j);
      if (n < kKeptScores) kept_.push_back(score);
      visit(j, score);
    }
  }

 private:
  KeyScore Compute(int64_t j) {
    const Problem& p = a_.problem;
    const int64_t k = KeyElement(a_, a_.k, s_, id_.b, id_.h / p.group(), j);
    LoadElements(a_.k.data, p.dtype, k, p.dim, k_.data());
    const ScoreTerms terms = TermsOf(a_, s_, id_, j, q_.data(), k_.data());
    KeyScore score{.value = terms.capped + terms.bias - terms.penalty};
    if (rounding_) rounding_->Judge(terms, k_.data(), &score);
    return score;
  }

  const Attention& a_;
  const Sequence& s_;
  const RowId id_;
  const StopFlag* const stop_;
  KeyRange keys_{0, 0};
  std::array<double, kHeadDimMax> q_;
  std::array<double, kHeadDimMax> k_;
  std::optional<ScoreRounding> rounding_;
  std::vector<KeyScore> kept_;
};

}  // namespace

void ReferenceRow(const Attention& a, int64_t b, int64_t h, int64_t i, double* o, double* lse,
                  RowRounding* rounding, const StopFlag* stop) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  RowScores row(a, s, {b, h, i}, rounding != nullptr, stop);
  std::fill(o, o + p.dim_v, 0.0);

  SoftmaxState<double> state;
  double highest = -kInfinity;
  row.ForEach([&](int64_t, const KeyScore& score) {
    if (score.value == -kInfinity) return;
    // NaN if any score is NaN.
    if (!(score.value <= state.max) && !std::isnan(state.max)) state.max = score.value;
    highest = std::max(highest, score.value + score.error);
  });
  std::optional<RoundingSums> sums;
  if (rounding != nullptr) {
    rounding->may_overflow = row.may_overflow();
    sums.emplace(p, state.max, highest, row.keys(), rounding);
  }

  std::array<double, kHeadDimMax> v;
  row.ForEach([&](int64_t j, const KeyScore& score) {
    if (score.value == -kInfinity) return;
    // Never exactly 0: Inf in a visible key's V must give Inf, not 0 * Inf.
    const double exponential = ScaledExp(score.value, state.max);
    const double weight = exponential == 0 ? std::numeric_limits<double>::min() : exponential;
    const int64_t v_at = KeyElement(a, a.v, s, b, h / p.group(), j);
    LoadKeptValue(a, {b, h, i}, j, v_at, v.data());
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weight * v[d];
    if (sums) sums->Add(score, weight, v.data());
    state.sum += weight;
  });
  const double sum = state.sum;
  const bool has_sink = p.has_sinks && i < s.q_len;
  const double sink = has_sink ? static_cast<double>(a.sinks[h]) : -kInfinity;
  double rescale = has_sink ? AddSink(state, sink) : 1;
  *lse = LogSumExp(state);
  if (sum != 0) {
    rescale *= InverseSum(state);
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] *= rescale;
  }
  if (sums) sums->Finish(sum, sink, o);
}

void StoreReferenceRow(const Attention& a, int64_t b, int64_t h, int64_t i, const StopFlag* stop) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  std::array<double, kHeadDimMax> o;
  double lse = 0;
  ReferenceRow(a, b, h, i, o.data(), &lse, nullptr, stop);
  const int64_t base = b * a.o.stride_b + h * a.o.stride_h + (s.q_row + i) * a.o.stride_l;
  for (int64_t d = 0; d < p.dim_v; ++d) StoreRounded(a.o.data, p.o_dtype(), base + d, o[d]);
  if (p.return_lse) {
    a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i] = static_cast<float>(lse);
  }
}

void CpuReference(const Attention& a) {
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const int64_t rows = SequenceOf(a, b).q_rows;
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < rows; ++i) StoreReferenceRow(a, b, h, i);
    }
  }
}

}  // namespace attend
