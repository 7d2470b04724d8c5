// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/gradient_terms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/score_terms.h"

namespace attend {
namespace {

constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void Load(const ConstTensorView& t, DType dtype, int64_t dim, int64_t b, int64_t h, int64_t row,
          RowElements* out) {
  LoadElements(t.data, dtype, b * t.stride_b + h * t.stride_h + row * t.stride_l, dim, out->data());
}

double Norm(const RowElements& x, int64_t dim) {
  double sum = 0;
  for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
    sum += x[d] * x[d];
  }
  return std::sqrt(sum);
}

// A sum of products, and that of their magnitudes.
struct Products {
  double sum = 0;
  double magnitude = 0;
};
Products Multiply(const RowElements& x, const RowElements& y, int64_t dim) {
  Products products;
  for (size_t d = 0; d < static_cast<size_t>(dim); ++d) {
    const double product = x[d] * y[d];
    products.sum += product;
    products.magnitude += std::abs(product);
  }
  return products;
}

bool Has16Bits(const Problem& p) {
  return p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
}

// What a factor of that magnitude may be off by because Tensor Cores take it in the problem's
// dtype: half a step, of subnormal numbers too.
double FactorRounding(const Problem& p, double magnitude) {
  if (!Has16Bits(p)) return 0;
  return UnitRoundoff(p.dtype) * magnitude + (p.dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-134);
}

}  // namespace

double SumRoundings(int64_t terms) {
  return (2 + std::sqrt(static_cast<double>(terms)) / 2) * kRoundoff;
}

double SubnormalRoundings(int64_t terms) { return (1 + static_cast<double>(terms)) * 0x1p-150; }

GradientTerms::GradientTerms(const Attention& attention, const Gradients& gradients)
    : a_(attention), g_(gradients) {}

double GradientTerms::LargestKey(int64_t b, int64_t kv_head) {
  const auto [entry, unknown] = largest_.try_emplace({b, kv_head}, 0.0);
  double& largest = entry->second;
  if (!unknown) return largest;
  const Sequence s = SequenceOf(a_, b);
  RowElements k;
  for (int64_t j = 0; j < s.k_len; ++j) {
    Load(a_.k, a_.problem.dtype, a_.problem.dim, b, kv_head, s.k_row + j, &k);
    const double norm = Norm(k, a_.problem.dim);
    if (norm > largest) largest = norm;  // what is not a number leaves no bound anyway
  }
  return largest;
}

GradientRow GradientTerms::Row(const RowId& id) {
  const Problem& p = a_.problem;
  GradientRow row{.id = id, .sequence = SequenceOf(a_, id.b), .q = {}, .d_o = {}};
  const int64_t at = row.sequence.q_row + id.i;
  RowElements o;
  Load(a_.q, p.dtype, p.dim, id.b, id.h, at, &row.q);
  Load(g_.d_o, p.o_dtype(), p.dim_v, id.b, id.h, at, &row.d_o);
  Load({a_.o.data, a_.o.stride_b, a_.o.stride_h, a_.o.stride_l}, p.o_dtype(), p.dim_v, id.b, id.h,
       at, &o);
  const int64_t lse = id.b * a_.lse_stride_b + id.h * a_.lse_stride_h + at;
  row.lse = static_cast<double>(a_.lse[lse]);
  double dot_units = SumRoundings(p.dim);
  if (p.dtype != DType::kFloat32) dot_units += static_cast<double>(p.dim) / 8 * kRoundoff;
  row.lse_error = 8 * kRoundoff * (1 + std::abs(row.lse)) +
                  dot_units * std::abs(static_cast<double>(p.scale)) * Norm(row.q, p.dim) *
                      LargestKey(id.b, id.h / p.group());
  const Products delta = Multiply(row.d_o, o, p.dim_v);
  row.less = delta.sum - (g_.d_lse == nullptr ? 0 : static_cast<double>(g_.d_lse[lse]));
  row.less_error = (SumRoundings(p.dim_v) + 4 * UnitRoundoff(p.o_dtype())) * delta.magnitude +
                   kRoundoff * std::abs(row.less) + SubnormalRoundings(p.dim_v);
  return row;
}

GradientKey GradientTerms::Key(int64_t b, int64_t kv_head, int64_t j) const {
  const Problem& p = a_.problem;
  GradientKey key{.j = j, .k = {}, .v = {}};
  const int64_t at = SequenceOf(a_, b).k_row + j;
  Load(a_.k, p.dtype, p.dim, b, kv_head, at, &key.k);
  Load(a_.v, p.dtype, p.dim_v, b, kv_head, at, &key.v);
  return key;
}

GradientPair GradientTerms::Pair(const GradientRow& row, const GradientKey& key) const {
  const Problem& p = a_.problem;
  const ScoreTerms terms = TermsOf(a_, row.sequence, row.id, key.j, row.q.data(), key.k.data());
  KeyScore score{.value = terms.capped + terms.bias - terms.penalty};
  if (score.value == -kInfinity) return {};
  ScoreRounding(p, row.q.data()).Judge(terms, key.k.data(), &score);
  GradientPair pair;
  const double x = score.value - row.lse;
  const double products = Has16Bits(p) ? std::abs(score.value) + std::abs(row.lse) : 0;
  const double rho =
      std::expm1(score.error + row.lse_error + 2 * kRoundoff * (std::abs(x) + products)) +
      4 * kRoundoff;
  const double weight = std::exp(x);
  const double weight_error = rho * weight + 0x1p-126;
  const double kept = DropoutFactor(a_, row.id, key.j);
  const double kept_roundings = p.dropout > 0 ? 2 * kRoundoff : 0;
  pair.factor = kept * weight;
  pair.factor_error = kept * (weight_error + FactorRounding(p, weight + weight_error) +
                              kept_roundings * (weight + weight_error));

  // What is dropped may be NaN.
  const Products d_weight = kept == 0 ? Products{} : Multiply(row.d_o, key.v, p.dim_v);
  const double m = kept * d_weight.sum - row.less;
  const double dot_error =
      (SumRoundings(p.dim_v) + kept_roundings) * d_weight.magnitude + SubnormalRoundings(p.dim_v);
  const double m_error = kept * dot_error + row.less_error + kRoundoff * std::abs(m);
  pair.d_score = weight * m;
  pair.d_score_error = (weight + weight_error) * m_error + weight_error * std::abs(m) +
                       2 * kRoundoff * std::abs(pair.d_score) + 0x1p-149;
  double slope = 1, slope_error = 0;
  if (p.softcap > 0) {
    const double share = terms.capped / static_cast<double>(p.softcap);
    const double share_error = score.error / static_cast<double>(p.softcap);
    slope = 1 - share * share;
    slope_error = (2 + share_error) * share_error + 4 * kRoundoff;
  }
  const double scale = static_cast<double>(p.scale);
  pair.d_dot = scale * slope * pair.d_score;
  const double d_score_error =
      pair.d_score_error + FactorRounding(p, std::abs(pair.d_score) + pair.d_score_error);
  pair.d_dot_error =
      std::abs(scale) * (slope * d_score_error + std::abs(pair.d_score) * slope_error) +
      2 * kRoundoff * std::abs(pair.d_dot) + std::max(1.0, std::abs(scale)) * 0x1p-150;
  return pair;
}

}  // namespace attend
