// SPDX-License-Identifier: Apache-2.0
//
// The judge of bit_patterns.h.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/dropout_factor.h"
#include "tests/kernels/support/bit_patterns.h"

namespace attend::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMost = std::numeric_limits<float>::max();
// A quarter of what must be added to the largest number of fp32 before it rounds to Inf.
constexpr double kSlack = 0x1p101;

// A result that every order of its sums gives: a finite number up to rounding, NaN or Inf. Unknown
// if an intermediate sum may overflow.
struct Known {
  bool known = true;
  double value = 0;
};

// scale * q.k, capped, plus bias, minus ALiBi.
Known ScoreKnown(const Attention& a, const Sequence& s, const std::array<int64_t, 3>& at, int64_t j,
                 const float* q, const float* k) {
  const auto [b, h, i] = at;
  const Problem& p = a.problem;
  double finite = 0, magnitude = 0, special = 0;
  for (int64_t d = 0; d < p.dim; ++d) {
    const double product = static_cast<double>(q[d]) * static_cast<double>(k[d]);
    if (std::isfinite(product)) {
      finite += product;
      magnitude += std::abs(product);
    } else {
      special += product;
    }
  }
  const double scale = static_cast<double>(p.scale);
  bool known = magnitude < kMost / 2;
  double score = scale * (finite + special);
  if (!std::isfinite(special)) magnitude = 0;
  // Products too small for fp32, made large by the scale.
  known = known && std::abs(scale) * static_cast<double>(p.dim) < 0x1p110;
  double size = std::abs(scale) * magnitude;
  if (p.softcap > 0) {
    const double cap = static_cast<double>(p.softcap);
    score = cap * std::tanh(score / cap);
    size = cap;
  }
  known = known && size < kMost / 2;
  if (p.has_bias) {
    const int64_t place = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
    const double bias = static_cast<double>(LoadElement(a.bias.data, a.bias.dtype, place));
    if (HasBits(a) && bias < 0) return {true, -kInfinity};
    score += bias;
    if (std::isfinite(bias)) size += std::abs(bias);
    known = known && size < kMost + kSlack;
  }
  if (p.has_alibi) {
    const double slope = static_cast<double>(a.alibi_slopes[b * a.alibi_stride_b + h]);
    const double penalty = slope * std::abs(static_cast<double>(j - i - s.offset));
    score -= penalty;
    if (std::isfinite(penalty)) size += std::abs(penalty);
    known = known && size < kMost + kSlack;
  }
  // NaN and Inf come from the inputs alone, and terms added to NaN.
  return {known || std::isnan(score), score};
}

class RowJudge {
 public:
  RowJudge(const Attention& a, const RowId& id, const Leeway& leeway)
      : a_(a), p_(a.problem), id_(id), leeway_(leeway), s_(SequenceOf(a, id.b)) {}

  // "" if the row is right.
  std::string Fault(Verdict* verdict) {
    ReferenceRow(a_, id_.b, id_.h, id_.i, reference_.data(), &reference_lse_);
    if (id_.i < s_.q_len) WeighKeys();
    if (open_ && !nan_) {
      ++verdict->open;
      return {};
    }
    bool special = !std::isfinite(reference_lse_);
    for (int64_t d = 0; d < p_.dim_v; ++d) {
      const double got = Got(d);
      const double want = nan_ ? kNan : reference_[d];
      special = special || !std::isfinite(want);
      const Fate fate = FateOf(d);
      whole_ = whole_ && fate == Fate::kKnown;
      if (fate == Fate::kOpen) continue;
      if (fate == Fate::kNotFinite ? std::isfinite(got) : !SameKind(got, want)) {
        return Text("o[" + std::to_string(d) + "]", got, want);
      }
    }
    ++(special ? verdict->specials : verdict->values);
    if (p_.return_lse && (nan_ || std::abs(reference_lse_) < kMost + kSlack)) {
      const double got = static_cast<double>(Lse());
      const double want = nan_ ? kNan : static_cast<double>(static_cast<float>(reference_lse_));
      if (!SameKind(got, want)) return Text("lse", got, want);
    } else if (p_.return_lse && std::isfinite(reference_lse_)) {
      whole_ = false;
    }
    if (!whole_ || nan_) return {};
    const RowsReport report = CheckRows(a_, {&id_, 1});
    return report.ok ? std::string() : report.detail;
  }

 private:
  static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  enum class Fate { kKnown, kNotFinite, kOpen };

  static bool SameKind(double a, double b) {
    return std::isfinite(a) ? std::isfinite(b) : std::isnan(a) ? std::isnan(b) : a == b;
  }

  double Got(int64_t d) const {
    const int64_t base =
        id_.b * a_.o.stride_b + id_.h * a_.o.stride_h + (s_.q_row + id_.i) * a_.o.stride_l;
    return static_cast<double>(LoadElement(a_.o.data, p_.o_dtype(), base + d));
  }
  float Lse() const {
    return a_.lse[id_.b * a_.lse_stride_b + id_.h * a_.lse_stride_h + s_.q_row + id_.i];
  }

  std::string Text(const std::string& what, double got, double want) const {
    return what + " of sequence " + std::to_string(id_.b) + ", head " + std::to_string(id_.h) +
           ", row " + std::to_string(id_.i) + " is " + std::to_string(got) + ", must be " +
           std::to_string(want);
  }

  // The scores of the visible keys, and whether they settle the row.
  void WeighKeys() {
    const KeyRange keys = VisibleKeys(p_.mask, s_, id_.i);
    std::array<float, kHeadDimMax> q, k;
    const int64_t q_at = id_.b * a_.q.stride_b + id_.h * a_.q.stride_h;
    const int64_t k_at = id_.b * a_.k.stride_b + id_.h / p_.group() * a_.k.stride_h;
    LoadElements(a_.q.data, p_.dtype, q_at + (s_.q_row + id_.i) * a_.q.stride_l, p_.dim, q.data());
    double max = -kInfinity;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      LoadElements(a_.k.data, p_.dtype, k_at + (s_.k_row + j) * a_.k.stride_l, p_.dim, k.data());
      const Known score = ScoreKnown(a_, s_, {id_.b, id_.h, id_.i}, j, q.data(), k.data());
      nan_ = nan_ || (score.known && !(score.value < kInfinity));  // Inf - Inf is NaN too
      open_ = open_ || !score.known;
      if (score.known && score.value > max) max = score.value;
      scores_.push_back(score.value);
      keys_.push_back(j);
    }
    max_ = max;
    const bool empty = max == -kInfinity && !nan_ && !open_;
    if (!p_.has_sinks || empty) return;
    const double sink = static_cast<double>(a_.sinks[id_.h]);
    // With unknown scores, all may be -inf: then the sink changes nothing.
    nan_ = nan_ || (max > -kInfinity && !(sink < kInfinity));
    sunk_ = sink > max + 80;
  }

  // The largest possible magnitude of column d of O. Scores beyond 2^20 are rounded so coarsely
  // that the weights may be any.
  double MostOf(int64_t d) const {
    double most = std::abs(reference_[d]);
    for (size_t n = 0; std::abs(max_) > 0x1p20 && n < keys_.size(); ++n) {
      const double v = std::abs(static_cast<double>(V(keys_[n], d)));
      if (std::isfinite(v)) most = std::max(most, v * DropoutFactor(a_, id_, keys_[n]));
    }
    return most;
  }

  float V(int64_t j, int64_t d) const {
    return LoadElement(a_.v.data, p_.dtype,
                       id_.b * a_.v.stride_b + id_.h / p_.group() * a_.v.stride_h +
                           (s_.k_row + j) * a_.v.stride_l + d);
  }

  // Column d of V decides how much of O is known.
  Fate FateOf(int64_t d) const {
    if (nan_) return Fate::kKnown;
    const double most = p_.o_dtype() == DType::kFloat16 ? 65504 : kMost;
    // Dropout enlarges O, which may then leave the range or not.
    if (p_.dropout > 0 && MostOf(d) > 0.9 * most) return Fate::kOpen;
    Fate fate = Fate::kKnown;
    // Weights that a kernel may take for 0, by its dtype's exponent less what careful sums need.
    const double vanishing = p_.dtype == DType::kFloat16 ? 10 : 70;
    for (int64_t j = 0; j < s_.k_len && id_.i < s_.q_len; ++j) {
      const float v = V(j, d);
      const bool visible = !keys_.empty() && j >= keys_.front() && j <= keys_.back();
      if (std::isfinite(v) || !visible || DropoutFactor(a_, id_, j) == 0) continue;
      const double score = scores_[static_cast<size_t>(j - keys_.front())];
      if (score != -kInfinity && std::isinf(v) && sunk_) fate = Fate::kNotFinite;
      if (score == -kInfinity && leeway_.vanishing_weights) return Fate::kOpen;
      if (score < max_ - vanishing && leeway_.vanishing_weights) fate = Fate::kNotFinite;
    }
    return fate;
  }

  const Attention& a_;
  const Problem& p_;
  const RowId id_;
  const Leeway leeway_;
  const Sequence s_;
  std::array<double, kHeadDimMax> reference_;
  double reference_lse_ = 0;
  std::vector<double> scores_;  // of keys_, those that the mask lets through
  std::vector<int64_t> keys_;
  double max_ = -kInfinity;
  bool nan_ = false;   // all of O and LSE
  bool open_ = false;  // some score may be anything
  bool sunk_ = false;  // the sink leaves so little of O that fp32 may take it for 0
  bool whole_ = true;  // every output is known
};

}  // namespace

Verdict JudgeBits(const OwnedAttention& owned, const Leeway& leeway) {
  Verdict verdict;
  const Attention& a = owned.attention;
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const int64_t rows = SequenceOf(a, b).q_rows;
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        verdict.fault = RowJudge(a, {b, h, i}, leeway).Fault(&verdict);
        if (!verdict.fault.empty()) return verdict;
      }
    }
  }
  return verdict;
}

}  // namespace attend::test
