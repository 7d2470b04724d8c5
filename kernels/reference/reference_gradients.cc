// SPDX-License-Identifier: Apache-2.0
//
// Per query row: scores and dP of its visible keys, then the row's softmax and delta, then dS and
// dT of each key (ReferenceKeyGradients). The whole pass adds each row's terms to dQ, dK, dV, dBias
// and dSink in double and rounds each gradient once.

#include "kernels/reference/reference_gradients.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/contract/limits.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/score_terms.h"
#include "kernels/reference/store_rounded.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Row = std::array<double, kHeadDimMax>;

int64_t ElementOf(const ConstTensorView& t, int64_t b, int64_t h, int64_t row) {
  return b * t.stride_b + h * t.stride_h + row * t.stride_l;
}
int64_t ElementOf(const TensorView& t, int64_t b, int64_t h, int64_t row) {
  return b * t.stride_b + h * t.stride_h + row * t.stride_l;
}

double Dot(const Row& a, const Row& b, int64_t count) {
  return std::inner_product(a.begin(), a.begin() + count, b.begin(), 0.0);
}

// Sums in double for one head's rows, rounded once on Store.
struct Sums {
  Sums(int64_t rows, int64_t dim) : dim(dim), values(static_cast<size_t>(rows * dim)) {}
  void Add(int64_t row, double factor, const Row& x) {
    double* const to = values.data() + row * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] += factor * x[d];
  }
  void Store(const TensorView& to, DType dtype, int64_t b, int64_t h, int64_t first) const {
    if (to.data == nullptr) return;
    for (size_t n = 0; n < values.size(); ++n) {
      const auto row = static_cast<int64_t>(n) / dim;
      StoreRounded(to.data, dtype, ElementOf(to, b, h, first + row) + static_cast<int64_t>(n) % dim,
                   values[n]);
    }
  }

  const int64_t dim;
  std::vector<double> values;
};

// dBias in double, [B|1, Hq|1, Lq|1, Lk], contiguous. Empty if not wanted.
class BiasSums {
 public:
  BiasSums(const Problem& p, const TensorView& to) : to_(to), len_k_(p.len_k) {
    if (to.data == nullptr) return;
    // A broadcast dimension has one element, even if it is broadcast to nothing.
    batch_ = to.stride_b != 0 ? p.batch : 1;
    heads_ = to.stride_h != 0 ? p.heads_q : 1;
    rows_ = to.stride_l != 0 ? p.len_q : 1;
    values_.resize(static_cast<size_t>(batch_ * heads_ * rows_ * len_k_));
  }
  void Add(const RowId& id, const std::vector<KeyGradient>& keys) {
    if (values_.empty()) return;
    const auto index = [](int64_t n, int64_t count) { return count > 1 ? n : 0; };
    double* const row =
        values_.data() +
        ((index(id.b, batch_) * heads_ + index(id.h, heads_)) * rows_ + index(id.i, rows_)) *
            len_k_;
    for (const KeyGradient& key : keys) row[key.j] += key.d_score;
  }
  void Store() const {
    size_t n = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t i = 0; i < rows_; ++i) {
          const int64_t base = ElementOf(to_, b, h, i);
          for (int64_t j = 0; j < len_k_; ++j) {
            StoreRounded(to_.data, DType::kFloat32, base + j, values_[n++]);
          }
        }
      }
    }
  }

 private:
  const TensorView& to_;
  const int64_t len_k_;
  int64_t batch_ = 0, heads_ = 0, rows_ = 0;
  std::vector<double> values_;
};

}  // namespace

std::vector<KeyGradient> ReferenceKeyGradients(const Attention& a, const Gradients& g,
                                               const RowId& id, double* d_sink,
                                               const StopFlag* stop) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, id.b);
  std::vector<KeyGradient> keys;
  if (d_sink != nullptr) *d_sink = 0;
  if (id.i >= s.q_len) return keys;
  const KeyRange visible = VisibleKeys(p.mask, s, id.i);
  const int64_t kv_head = id.h / p.group();
  const int64_t q_row = s.q_row + id.i;
  Row q, d_o, other;
  LoadElements(a.q.data, p.dtype, ElementOf(a.q, id.b, id.h, q_row), p.dim, q.data());
  LoadElements(g.d_o.data, p.o_dtype(), ElementOf(g.d_o, id.b, id.h, q_row), p.dim_v, d_o.data());

  // Until the row's maximum and sum are known, the fields hold: weight the score, d_score dP, and
  // d_dot scale times the cap's slope.
  SoftmaxState<double> state;
  for (int64_t j = visible.begin; j < visible.end && !Stopped(stop); ++j) {
    const int64_t k = KeyElement(a, a.k, s, id.b, kv_head, j);
    LoadElements(a.k.data, p.dtype, k, p.dim, other.data());
    const ScoreTerms terms = TermsOf(a, s, id, j, q.data(), other.data());
    const double score = terms.capped + terms.bias - terms.penalty;
    if (score == -kInfinity) continue;
    Add(state, score);
    const int64_t v = KeyElement(a, a.v, s, id.b, kv_head, j);
    const double kept = LoadKeptValue(a, id, j, v, other.data());
    const double share = ExactCap(p).Share(terms.capped);
    keys.push_back({.j = j,
                    .weight = score,
                    .kept = kept,
                    .d_score = Dot(d_o, other, p.dim_v),
                    .d_dot = ExactScale(p) * (1 - share * share)});
  }
  const double sink = p.has_sinks ? static_cast<double>(a.sinks[id.h]) : -kInfinity;
  if (p.has_sinks) AddSink(state, sink);
  const int64_t lse = id.b * a.lse_stride_b + id.h * a.lse_stride_h + q_row;
  const bool part = HasPart(p);
  if (part) state = {.max = static_cast<double>(a.lse[lse]), .sum = 1};
  if (part && state.max == -kInfinity) keys.clear();
  double delta = 0;
  for (KeyGradient& key : keys) {
    key.weight = ScaledExp(key.weight, state.max) * InverseSum(state);
    delta += key.weight * key.d_score;
  }
  if (part) {
    LoadElements(a.o.data, p.o_dtype(), ElementOf(a.o, id.b, id.h, q_row), p.dim_v, other.data());
    delta = Dot(d_o, other, p.dim_v);
  }
  const double less = delta - (g.d_lse != nullptr ? static_cast<double>(g.d_lse[lse]) : 0);
  for (KeyGradient& key : keys) {
    key.d_score = key.weight * (key.d_score - less);
    key.d_dot *= key.d_score;
  }
  if (d_sink != nullptr && p.has_sinks) {
    *d_sink = -ScaledExp(sink, state.max) * InverseSum(state) * less;
  }
  return keys;
}

void CpuReferenceGradients(const Attention& a, const Gradients& g, const StopFlag* stop) {
  const Problem& p = a.problem;
  BiasSums d_bias(p, g.d_bias);
  std::vector<double> d_sinks(static_cast<size_t>(p.heads_q));
  Row q, k, d_o;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    const int64_t k_rows = p.packed ? s.k_len : p.len_k;
    for (int64_t kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
      Sums d_k(k_rows, p.dim), d_v(k_rows, p.dim_v);
      for (int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
        Sums d_q(s.q_rows, p.dim);
        for (int64_t i = 0; i < s.q_len && !Stopped(stop); ++i) {
          const RowId id{b, h, i};
          double d_sink = 0;
          const std::vector<KeyGradient> keys = ReferenceKeyGradients(a, g, id, &d_sink, stop);
          d_sinks[static_cast<size_t>(h)] += d_sink;
          d_bias.Add(id, keys);
          LoadElements(a.q.data, p.dtype, ElementOf(a.q, b, h, s.q_row + i), p.dim, q.data());
          LoadElements(g.d_o.data, p.o_dtype(), ElementOf(g.d_o, b, h, s.q_row + i), p.dim_v,
                       d_o.data());
          for (const KeyGradient& key : keys) {
            const int64_t at = KeyElement(a, a.k, s, b, kv_head, key.j);
            LoadElements(a.k.data, p.dtype, at, p.dim, k.data());
            d_q.Add(i, key.d_dot, k);
            d_k.Add(key.j, key.d_dot, q);
            if (key.kept != 0) d_v.Add(key.j, key.weight * key.kept, d_o);
          }
        }
        d_q.Store(g.d_q, p.dtype, b, h, s.q_row);
      }
      d_k.Store(g.d_k, p.dtype, b, kv_head, s.k_row);
      d_v.Store(g.d_v, p.dtype, b, kv_head, s.k_row);
    }
  }
  d_bias.Store();
  for (int64_t h = 0; g.d_sinks != nullptr && h < p.heads_q; ++h) {
    g.d_sinks[h] = static_cast<float>(d_sinks[static_cast<size_t>(h)]);
  }
}

}  // namespace attend
