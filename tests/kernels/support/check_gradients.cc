// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/check_gradients.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/contract/limits.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/reference_gradients.h"
#include "kernels/reference/score_rounding.h"
#include "kernels/reference/score_terms.h"

namespace attend::test {
namespace {

constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);

using Elements = std::array<double, kHeadDimMax>;

double SumRoundings(int64_t terms) {
  return (2 + std::sqrt(static_cast<double>(terms)) / 2) * kRoundoff;
}

// In addition, for subnormal numbers, whose rounding errors are not relative to them.
double SubnormalRoundings(int64_t terms) { return (1 + static_cast<double>(terms)) * 0x1p-150; }

// Half a step between the dtype's subnormal numbers.
double SubnormalRounding(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-149;
}

double Overflow(DType dtype) {
  return dtype == DType::kFloat16 ? 65520 : dtype == DType::kBFloat16 ? 0x1.ffp127 : 0x1.ffffffp127;
}

Elements Load(const ConstTensorView& t, DType dtype, int64_t dim, int64_t b, int64_t h,
              int64_t row) {
  Elements out{};
  LoadElements(t.data, dtype, b * t.stride_b + h * t.stride_h + row * t.stride_l, dim, out.data());
  return out;
}

}  // namespace

// A row's quantities, as defined in the header.
struct GradientsJudge::Row {
  RowId id;
  Sequence sequence;
  int64_t kv_head = 0;
  int64_t bias_row = 0;
  Elements q, d_o;
  double lse = 0;
  double lse_error = 0;
  double less = 0;
  double less_error = 0;
};

// The quantities of one of its keys.
struct GradientsJudge::Key {
  KeyGradient truth;
  Elements k;
  ScoreTerms terms;
  double score = 0;
  double score_error = 0;
  double d_weight = 0;  // dP
  double magnitude = 0;
  double factor_error = 0;  // of the weight as dV's factor
  double d_score_error = 0;
  double d_dot_error = 0;
};

void JudgedTensor::Resize(int64_t batch, int64_t head_count, int64_t row_count, int64_t row_dim) {
  heads = head_count;
  rows = row_count;
  dim = row_dim;
  terms.resize(static_cast<size_t>(batch * heads * rows));
  for (std::vector<double>* all : {&value, &error, &magnitude}) {
    all->resize(static_cast<size_t>(batch * heads * rows * dim));
  }
}

GradientsJudge::GradientsJudge(const Attention& attention, const Gradients& gradients,
                               DType factors)
    : a_(attention), g_(gradients), factors_(factors) {
  const Problem& p = a_.problem;
  d_q_.Resize(p.batch, p.heads_q, p.len_q, p.dim);
  d_k_.Resize(p.batch, p.heads_kv, p.len_k, p.dim);
  d_v_.Resize(p.batch, p.heads_kv, p.len_k, p.dim_v);
  d_q_.factor = d_k_.factor = std::max(1.0, std::abs(static_cast<double>(p.scale)));
  d_v_.factor = KeptFactor(p);
  if (p.has_bias) {
    d_bias_.Resize(a_.bias.stride_b == 0 ? 1 : p.batch, a_.bias.stride_h == 0 ? 1 : p.heads_q,
                   a_.bias.stride_q == 0 ? 1 : p.len_q, p.len_k);
  }
  if (p.has_sinks) d_sinks_.Resize(1, p.heads_q, 1, 1);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a_, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < s.q_len; ++i) AddRow({b, h, i});
    }
  }
}

// Without a key, O is 0, whatever dO is.
GradientsJudge::Row GradientsJudge::RowOf(const RowId& id, bool has_keys) const {
  const Problem& p = a_.problem;
  Row row;
  row.id = id;
  row.sequence = SequenceOf(a_, id.b);
  row.kv_head = id.h / p.group();
  const int64_t at = row.sequence.q_row + id.i;
  row.q = Load(a_.q, p.dtype, p.dim, id.b, id.h, at);
  row.d_o = has_keys ? Load(g_.d_o, p.o_dtype(), p.dim_v, id.b, id.h, at) : Elements{};
  const ConstTensorView o{a_.o.data, a_.o.stride_b, a_.o.stride_h, a_.o.stride_l};
  const Elements got = Load(o, p.o_dtype(), p.dim_v, id.b, id.h, at);
  std::array<double, kHeadDimMax> truth{};
  ReferenceRow(a_, id.b, id.h, id.i, truth.data(), &row.lse);
  const int64_t lse = id.b * a_.lse_stride_b + id.h * a_.lse_stride_h + at;
  if (std::isfinite(row.lse)) {
    row.lse_error = std::abs(static_cast<double>(a_.lse[lse]) - row.lse);
  }
  double delta = 0, off = 0, magnitude = 0;
  for (size_t d = 0; d < static_cast<size_t>(p.dim_v); ++d) {
    const auto x = static_cast<double>(row.d_o[d]);
    delta += x * truth[d];
    off += x * (static_cast<double>(got[d]) - truth[d]);
    magnitude += std::abs(x * static_cast<double>(got[d]));
  }
  row.less = delta - (g_.d_lse == nullptr ? 0 : static_cast<double>(g_.d_lse[lse]));
  row.less_error = std::abs(off) + SumRoundings(p.dim_v) * magnitude + SubnormalRoundings(p.dim_v) +
                   kRoundoff * std::abs(row.less);
  const auto index = [](int64_t n, int64_t stride) { return stride == 0 ? 0 : n; };
  row.bias_row = d_bias_.Row(index(id.b, a_.bias.stride_b), index(id.h, a_.bias.stride_h),
                             index(id.i, a_.bias.stride_q));
  return row;
}

double GradientsJudge::WeightError(const Row& row, const Key& key) const {
  const double x = std::abs(key.score - row.lse);
  const double products = Rounds() ? std::abs(key.score) + std::abs(row.lse) : 0;
  const double log_error = key.score_error + row.lse_error + 2 * kRoundoff * (x + products);
  return (std::expm1(log_error) + 4 * kRoundoff) * key.truth.weight + 0x1p-126;
}

std::vector<GradientsJudge::Key> GradientsJudge::KeysOf(const std::vector<KeyGradient>& truths,
                                                        Row* row) const {
  const Problem& p = a_.problem;
  ScoreRounding rounding(p, row->q.data());
  const double sums = SumRoundings(p.dim_v) + SumRoundings(static_cast<int64_t>(truths.size()));
  std::vector<Key> keys(truths.size());
  double moved = 0, delta_moved = 0;  // errors in the sum of weights and in sum P dP
  for (size_t n = 0; n < keys.size(); ++n) {
    Key& key = keys[n];
    key.truth = truths[n];
    const int64_t at = row->sequence.k_row + key.truth.j;
    key.k = Load(a_.k, p.dtype, p.dim, row->id.b, row->kv_head, at);
    key.terms = TermsOf(a_, row->sequence, row->id, key.truth.j, row->q.data(), key.k.data());
    KeyScore score{.value = key.terms.capped + key.terms.bias - key.terms.penalty};
    rounding.Judge(key.terms, key.k.data(), &score);
    key.score = score.value;
    key.score_error = score.error;
    const Elements v = Load(a_.v, p.dtype, p.dim_v, row->id.b, row->kv_head, at);
    // A dropped weight may be NaN.
    for (size_t d = 0; key.truth.kept != 0 && d < static_cast<size_t>(p.dim_v); ++d) {
      const double product = key.truth.kept * row->d_o[d] * v[d];
      key.d_weight += product;
      key.magnitude += std::abs(product);
    }
    const double off = WeightError(*row, key);
    moved += off;
    delta_moved += off * std::abs(key.d_weight) + sums * key.truth.weight * key.magnitude;
  }
  if (row->lse < -16 || row->lse > 64) {
    row->lse_error += moved;
    row->less_error += delta_moved;
  }
  return keys;
}

void GradientsJudge::BoundKey(const Row& row, Key* key) const {
  const Problem& p = a_.problem;
  const KeyGradient& truth = key->truth;
  const double kept_roundings = p.dropout > 0 ? 2 * kRoundoff : 0;
  const auto as_factor = [&](double value, double error) {
    if (!Rounds()) return error;
    return error + UnitRoundoff(factors_) * (value + error) + SubnormalRounding(factors_);
  };
  const double weight_error = WeightError(row, *key);
  const double most = truth.weight + weight_error;
  key->factor_error = truth.kept * (as_factor(truth.weight, weight_error) + kept_roundings * most);
  const double m = std::abs(key->d_weight - row.less);
  const double m_error = (SumRoundings(p.dim_v) + kept_roundings) * key->magnitude +
                         truth.kept * SubnormalRoundings(p.dim_v) + row.less_error + kRoundoff * m;
  const double size = std::abs(truth.d_score);
  key->d_score_error = most * m_error + weight_error * m + 2 * kRoundoff * size + 0x1p-149;
  double slope = 1, slope_error = 0;
  if (p.softcap > 0) {
    const double t = key->terms.capped / static_cast<double>(p.softcap);
    const double t_error = key->score_error / static_cast<double>(p.softcap);
    slope = 1 - t * t;
    slope_error = (2 + t_error) * t_error + 4 * kRoundoff;
  }
  const double scale = std::abs(static_cast<double>(p.scale));
  key->d_dot_error =
      scale * as_factor(slope * size, slope * key->d_score_error + size * slope_error) +
      2 * kRoundoff * std::abs(truth.d_dot) + std::max(1.0, scale) * 0x1p-150;
}

void GradientsJudge::AddRow(const RowId& id) {
  const Problem& p = a_.problem;
  double d_sink = 0;
  const std::vector<KeyGradient> truths = ReferenceKeyGradients(a_, g_, id, &d_sink);
  Row row = RowOf(id, !truths.empty() || HasPart(p));
  for (Key& key : KeysOf(truths, &row)) {
    BoundKey(row, &key);
    AddKey(row, key);
  }
  if (p.has_bias) ++d_bias_.terms[static_cast<size_t>(row.bias_row)];
  if (!p.has_sinks) return;
  const auto n = static_cast<size_t>(id.h);
  const double weight = std::exp(static_cast<double>(a_.sinks[id.h]) - row.lse);
  const double sink_error = weight * std::expm1(row.lse_error);
  ++d_sinks_.terms[n];
  d_sinks_.value[n] += d_sink;
  d_sinks_.magnitude[n] += std::abs(weight * row.less);
  d_sinks_.error[n] += sink_error * std::abs(row.less) + (weight + sink_error) * row.less_error;
}

void GradientsJudge::AddKey(const Row& row, const Key& key) {
  const Problem& p = a_.problem;
  const auto add = [](JudgedTensor* to, int64_t at, int64_t dim, const Elements& by, double factor,
                      double error) {
    ++to->terms[static_cast<size_t>(at)];
    for (int64_t d = 0; d < dim; ++d) {
      const auto n = static_cast<size_t>(at * dim + d);
      const auto x = static_cast<double>(by[static_cast<size_t>(d)]);
      to->value[n] += factor * x;
      to->magnitude[n] += std::abs(factor * x);
      to->error[n] += error * std::abs(x);
    }
  };
  const int64_t key_row = d_k_.Row(row.id.b, row.kv_head, key.truth.j);
  add(&d_q_, d_q_.Row(row.id.b, row.id.h, row.id.i), p.dim, key.k, key.truth.d_dot,
      key.d_dot_error);
  add(&d_k_, key_row, p.dim, row.q, key.truth.d_dot, key.d_dot_error);
  if (key.truth.kept != 0) {  // otherwise dO may be NaN
    add(&d_v_, key_row, p.dim_v, row.d_o, key.truth.kept * key.truth.weight, key.factor_error);
  }
  if (!p.has_bias) return;
  const auto n = static_cast<size_t>(row.bias_row * p.len_k + key.truth.j);
  d_bias_.value[n] += key.truth.d_score;
  d_bias_.magnitude[n] += std::abs(key.truth.d_score);
  d_bias_.error[n] += key.d_score_error;
}

namespace {

// Visits the elements of the answer one by one.
class Verdict {
 public:
  void See(const char* what, const JudgedTensor& truth, int64_t row, int64_t d, const void* data,
           DType dtype, int64_t at) {
    const auto n = static_cast<size_t>(row * truth.dim + d);
    const auto got = static_cast<double>(LoadElement(data, dtype, at));
    const double value = truth.value[n];
    double allowed =
        truth.error[n] + SumRoundings(truth.terms[static_cast<size_t>(row)]) * truth.magnitude[n];
    // Rounding adds to errors made before it.
    allowed += kRoundoff * (std::abs(value) + allowed);
    if (value != 0 || allowed > 0) {
      allowed += truth.factor * SubnormalRoundings(truth.terms[static_cast<size_t>(row)]);
    }
    double rounding = UnitRoundoff(dtype) * (std::abs(value) + allowed);
    if (value != 0 || allowed > 0) rounding += SubnormalRounding(dtype);
    double off = std::abs(got - value);
    if (!std::isfinite(value)) {
      off = (std::isnan(value) ? std::isnan(got) : got == value) ? 0 : 2;
      allowed = 1;
      rounding = 0;
    } else if (std::isinf(got) && std::abs(value) + allowed + rounding >= Overflow(dtype)) {
      off = 0;
    }
    allowed += rounding;
    if (off <= allowed || !fault_.empty()) return;
    fault_ = std::string(what) + " row " + std::to_string(row) + " of [" +
             std::to_string(truth.heads) + " heads, " + std::to_string(truth.rows) +
             " rows], element " + std::to_string(d) + ": " + std::to_string(got) + ", not " +
             std::to_string(value) + ", off by " + std::to_string(off / allowed) + " bounds";
  }

  // dQ, dK or dV.
  void SeeRows(const char* what, const Attention& a, const JudgedTensor& truth,
               const TensorView& to, bool keys) {
    const Problem& p = a.problem;
    for (int64_t b = 0; b < p.batch && to.data != nullptr; ++b) {
      const Sequence s = SequenceOf(a, b);
      const int64_t first = keys ? s.k_row : s.q_row;
      const int64_t rows = p.packed ? (keys ? s.k_len : s.q_len) : truth.rows;
      for (int64_t n = 0; n < truth.heads * rows; ++n) {
        const int64_t h = n / rows, i = n % rows;
        const int64_t at = b * to.stride_b + h * to.stride_h + (first + i) * to.stride_l;
        for (int64_t d = 0; d < truth.dim; ++d) {
          See(what, truth, truth.Row(b, h, i), d, to.data, p.dtype, at + d);
        }
      }
    }
  }

  const std::string& fault() const { return fault_; }

 private:
  std::string fault_;
};

}  // namespace

std::string GradientsJudge::Fault(const Gradients& answer) const {
  Verdict verdict;
  verdict.SeeRows("dQ", a_, d_q_, answer.d_q, false);
  verdict.SeeRows("dK", a_, d_k_, answer.d_k, true);
  verdict.SeeRows("dV", a_, d_v_, answer.d_v, true);
  const TensorView& bias = answer.d_bias;
  const auto bias_rows = static_cast<int64_t>(d_bias_.terms.size());
  for (int64_t row = 0; row < bias_rows && bias.data != nullptr; ++row) {
    const int64_t at = row / d_bias_.rows / d_bias_.heads * bias.stride_b +
                       row / d_bias_.rows % d_bias_.heads * bias.stride_h +
                       row % d_bias_.rows * bias.stride_l;
    for (int64_t j = 0; j < d_bias_.dim; ++j) {
      verdict.See("dBias", d_bias_, row, j, bias.data, DType::kFloat32, at + j);
    }
  }
  for (int64_t h = 0; answer.d_sinks != nullptr && h < a_.problem.heads_q; ++h) {
    verdict.See("dSink", d_sinks_, h, 0, answer.d_sinks, DType::kFloat32, h);
  }
  return verdict.fault();
}

}  // namespace attend::test
