// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/bit_patterns.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/dropout_factor.h"

namespace attend::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMost = std::numeric_limits<float>::max();
// A quarter of what must be added to the largest number of fp32 before it rounds to Inf.
constexpr double kSlack = 0x1p101;

enum class Kind { kNan, kInfinity, kSubnormal, kMost, kHuge, kZero, kAny };
constexpr int kKinds = 7;

class Spoiler {
 public:
  explicit Spoiler(uint64_t seed) : random_(seed) {
    // Half of the problems are finite, so that NaN does not hide everything else.
    kinds_ = Chance(0.5) ? 0b0111100 : static_cast<uint32_t>(Range(1, (1 << kKinds) - 1));
    if (Chance(0.2)) kinds_ = 0b0000001;
  }

  void Spoil(OwnedAttention* owned) {
    const Attention& a = owned->attention;
    const Problem& p = a.problem;
    const std::array<double, 3> shares{Share(), Share(), Share()};
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = SequenceOf(a, b);
      for (int64_t h = 0; h < p.heads_q; ++h) {
        SpoilRows(p.dtype, s.q_len, p.dim, shares[0],
                  [&](int64_t i, int64_t d) { return owned->Q(b, h, i, d); });
      }
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        SpoilRows(p.dtype, s.k_len, p.dim, shares[1],
                  [&](int64_t j, int64_t d) { return owned->K(b, h, j, d); });
        SpoilRows(p.dtype, s.k_len, p.dim_v, shares[2],
                  [&](int64_t j, int64_t d) { return owned->V(b, h, j, d); });
      }
    }
    if (p.has_bias && p.batch > 0) SpoilBias(a);
    const double share = Share();
    for (int64_t h = 0; h < p.heads_q; ++h) {
      if (p.has_sinks && Chance(share)) Write(DType::kFloat32, const_cast<float*>(a.sinks + h));
    }
    const int64_t sets = a.alibi_stride_b == 0 ? 1 : p.batch;
    for (int64_t n = 0; p.has_alibi && n < sets * p.heads_q; ++n) {
      if (Chance(share)) Write(DType::kFloat32, const_cast<float*>(a.alibi_slopes + n));
    }
  }

 private:
  int64_t Range(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }
  double Share() {
    constexpr double kShares[] = {0, 0, 0, 0.0003, 0.003, 0.1};
    return kShares[Range(0, 5)];
  }

  // Elements are counted by the gaps between those that are spoilt: most rows have none.
  template <class At>
  void SpoilRows(DType dtype, int64_t rows, int64_t dim, double share, const At& at) {
    if (share == 0) return;
    std::geometric_distribution<int64_t> gap(share);
    for (int64_t n = gap(random_); n < rows * dim; n += 1 + gap(random_)) {
      Write(dtype, at(n / dim, n % dim));
    }
  }

  void Write(DType dtype, void* element) {
    const int mantissa = dtype == DType::kFloat16 ? 10 : dtype == DType::kBFloat16 ? 7 : 23;
    const int width = dtype == DType::kFloat32 ? 32 : 16;
    const uint32_t sign = Chance(0.5) ? 1u << (width - 1) : 0;
    const uint32_t exponents = (1u << (width - 1)) - (1u << mantissa);  // all their bits
    const auto fraction = static_cast<uint32_t>(Range(1, (int64_t{1} << mantissa) - 1));
    const uint32_t largest = exponents - (1u << mantissa);
    uint32_t bits = 0;
    switch (DrawKind()) {
      case Kind::kNan:
        bits = sign | exponents | (Chance(0.3) ? (1u << mantissa) - 1 : fraction);
        break;
      case Kind::kInfinity:
        bits = sign | exponents;
        break;
      case Kind::kSubnormal:
        bits = sign | fraction;
        break;
      case Kind::kMost:
        bits = sign | largest | ((1u << mantissa) - 1);
        break;
      case Kind::kHuge:
        bits = sign | (largest - (static_cast<uint32_t>(Range(0, 3)) << mantissa)) | fraction;
        break;
      case Kind::kZero:
        bits = sign;
        break;
      case Kind::kAny:
        bits = static_cast<uint32_t>(random_());
        break;
    }
    if (width == 32) {
      *static_cast<uint32_t*>(element) = bits;
    } else {
      *static_cast<uint16_t*>(element) = static_cast<uint16_t>(bits);
    }
  }

  Kind DrawKind() {
    for (;;) {
      const int64_t kind = Range(0, kKinds - 1);
      if ((kinds_ >> kind & 1) != 0) return static_cast<Kind>(kind);
    }
  }

  // Masks as people write them: padding on one side, whole rows, scattered keys.
  void SpoilBias(const Attention& a) {
    const Problem& p = a.problem;
    if (a.bias.dtype == DType::kBit) return;  // every pattern is drawn as it is
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    const float low = a.bias.dtype == DType::kFloat16    ? -65504.0f
                      : a.bias.dtype == DType::kBFloat16 ? -0x1.fep127f
                                                         : kLowest;
    const float masks[] = {-HUGE_VALF, low, low, -1e4f, -1e9f, -1e10f, -3e38f, 3e38f, -low};
    constexpr int64_t kPads[] = {1, 15, 63, 64, 65, 128, 200, 1000};
    const float mask = masks[Range(0, 8)];
    const int64_t pad = kPads[Range(0, 7)];
    const int64_t shape = Range(0, 4);  // the last: none
    const double share = Share();
    for (int64_t b = 0; b < (a.bias.stride_b == 0 ? 1 : p.batch); ++b) {
      for (int64_t h = 0; h < (a.bias.stride_h == 0 ? 1 : p.heads_q); ++h) {
        for (int64_t i = 0; i < (a.bias.stride_q == 0 ? 1 : p.len_q); ++i) {
          const int64_t row = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q;
          const bool whole = shape == 2 && Chance(0.5);
          for (int64_t j = 0; j < p.len_k; ++j) {
            void* at = static_cast<char*>(const_cast<void*>(a.bias.data)) +
                       (row + j) * DTypeBytes(a.bias.dtype);
            const bool masked = whole || (shape == 0 && j < pad) ||
                                (shape == 1 && j >= p.len_k - pad) || (shape == 3 && Chance(0.5));
            if (masked) StoreElement(at, a.bias.dtype, 0, mask);
            if (share > 0 && Chance(share)) Write(a.bias.dtype, at);
          }
        }
      }
    }
  }

  std::mt19937_64 random_;
  uint32_t kinds_;  // bit n: Kind n
};

// What is known of a number whatever the order of its sums: a value up to rounding, perhaps NaN or
// Inf, or nothing, as a sum on the way may overflow.
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
  // NaN and Inf come from the inputs alone, and whatever is added to NaN.
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
    // With scores that are not known, all may be -inf: then the sink changes nothing.
    nan_ = nan_ || (max > -kInfinity && !(sink < kInfinity));
    sunk_ = sink > max + 80;
  }

  // What a column of V allows to be known of O.
  Fate FateOf(int64_t d) const {
    if (nan_) return Fate::kKnown;
    const double most = p_.o_dtype() == DType::kFloat16 ? 65504 : kMost;
    // What dropout makes larger may leave the range or not.
    if (p_.dropout > 0 && std::abs(reference_[d]) > 0.9 * most) return Fate::kOpen;
    Fate fate = Fate::kKnown;
    // Weights that a kernel may take for 0, by its dtype's exponent less what careful sums need.
    const double vanishing = p_.dtype == DType::kFloat16 ? 10 : 70;
    for (int64_t j = 0; j < s_.k_len && id_.i < s_.q_len; ++j) {
      const float v = LoadElement(a_.v.data, p_.dtype,
                                  id_.b * a_.v.stride_b + id_.h / p_.group() * a_.v.stride_h +
                                      (s_.k_row + j) * a_.v.stride_l + d);
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

void SpoilBits(OwnedAttention* owned, uint64_t seed) { Spoiler(seed).Spoil(owned); }

void SpreadMagnitudes(OwnedAttention* owned, uint64_t seed) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  std::mt19937_64 random(seed);
  const bool half = p.dtype == DType::kFloat16;
  std::uniform_real_distribution<double> exponent(half ? -24 : -149, half ? 16 : 128);
  const auto fill = [&](int64_t rows, int64_t dim, const auto& at) {
    for (int64_t n = 0; n < rows * dim; ++n) {
      const double value = std::min(std::exp2(exponent(random)), half ? 65504 : kMost);
      Set(a, at(n / dim, n % dim), static_cast<float>(random() % 2 == 0 ? value : -value));
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      fill(s.q_len, p.dim, [&](int64_t i, int64_t d) { return owned->Q(b, h, i, d); });
    }
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      fill(s.k_len, p.dim, [&](int64_t j, int64_t d) { return owned->K(b, h, j, d); });
      fill(s.k_len, p.dim_v, [&](int64_t j, int64_t d) { return owned->V(b, h, j, d); });
    }
  }
}

ProblemSpec BitPatternSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  std::mt19937_64 random(seed);
  constexpr float kScales[] = {0.0f, 1e-40f, -1e-20f, 1e5f, 1e20f, -3e38f, 3.4e38f};
  if (random() % 6 == 0) spec.problem.scale = kScales[random() % 7];
  spec.problem.return_lse = random() % 8 != 0;
  return spec;
}

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
