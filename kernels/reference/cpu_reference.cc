// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/cpu_reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels/contract/softmax_state.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The value of `dtype` nearest to a double. Going through float would round twice, so the float is
// rounded to odd: its last bit then remembers that something was cut off.
void StoreRounded(void* data, DType dtype, int64_t index, double value) {
  float narrow = static_cast<float>(value);
  if (dtype != DType::kFloat32 && std::isfinite(narrow) && static_cast<double>(narrow) != value) {
    if ((std::bit_cast<uint32_t>(narrow) & 1u) == 0) {
      constexpr float kUp = std::numeric_limits<float>::infinity();
      narrow = std::nextafter(narrow, static_cast<double>(narrow) < value ? kUp : -kUp);
    }
  }
  StoreElement(data, dtype, index, narrow);
}

// Everything of problem.h between q.k and the mask, for query row i and key j.
ScoreTerms TermsOf(const Attention& a, const Sequence& s, const RowId& id, int64_t j,
                   const float* q, const float* k) {
  const Problem& p = a.problem;
  // Several sums at once: one would wait for itself with every addition.
  constexpr int64_t kSums = 8;
  std::array<double, kSums> dots{};
  std::array<double, kSums> magnitudes{};
  std::array<double, kHeadDimMax> products;
  for (int64_t d = 0; d < p.dim; ++d) {
    products[d] = static_cast<double>(q[d]) * static_cast<double>(k[d]);
  }
  // Whole blocks in a loop of known length, which compilers make vectors of.
  const int64_t whole = p.dim / kSums * kSums;
  for (int64_t d = 0; d < whole; d += kSums) {
    for (int64_t n = 0; n < kSums; ++n) {
      dots[n] += products[d + n];
      magnitudes[n] += std::abs(products[d + n]);
    }
  }
  for (int64_t d = whole; d < p.dim; ++d) {
    dots[d - whole] += products[d];
    magnitudes[d - whole] += std::abs(products[d]);
  }
  ScoreTerms terms;
  terms.dot = std::accumulate(dots.begin(), dots.end(), 0.0);
  terms.magnitude = std::accumulate(magnitudes.begin(), magnitudes.end(), 0.0);
  terms.capped = static_cast<double>(p.scale) * terms.dot;
  if (p.softcap > 0) {
    const double cap = static_cast<double>(p.softcap);
    terms.capped = cap * std::tanh(terms.capped / cap);
  }
  if (p.has_bias) {
    const int64_t at = id.b * a.bias.stride_b + id.h * a.bias.stride_h + id.i * a.bias.stride_q + j;
    terms.bias = static_cast<double>(LoadElement(a.bias.data, a.bias.dtype, at));
  }
  if (p.has_alibi) {
    const double slope = static_cast<double>(a.alibi_slopes[id.b * a.alibi_stride_b + id.h]);
    terms.penalty = slope * std::abs(static_cast<double>(j - id.i - s.offset));
  }
  return terms;
}

// The scores of one query row over the keys it sees, first key first, as often as asked for.
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

  // visit(key, score) for every key in turn, until `stop` is set.
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
  std::array<float, kHeadDimMax> q_;
  std::array<float, kHeadDimMax> k_;
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
    // NaN if any is.
    if (!(score.value <= state.max) && !std::isnan(state.max)) state.max = score.value;
    highest = std::max(highest, score.value + score.error);
  });
  std::optional<RoundingSums> sums;
  if (rounding != nullptr) {
    rounding->may_overflow = row.may_overflow();
    sums.emplace(p, state.max, highest, row.keys(), rounding);
  }

  std::array<float, kHeadDimMax> v;
  row.ForEach([&](int64_t j, const KeyScore& score) {
    if (score.value == -kInfinity) return;
    // Never 0, however small: a visible key's Inf is Inf times something.
    const double exponential = ScaledExp(score.value, state.max);
    const double weight = exponential == 0 ? std::numeric_limits<double>::min() : exponential;
    const int64_t v_at = KeyElement(a, a.v, s, b, h / p.group(), j);
    LoadElements(a.v.data, p.dtype, v_at, p.dim_v, v.data());
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weight * static_cast<double>(v[d]);
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
