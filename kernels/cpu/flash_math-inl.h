// SPDX-License-Identifier: Apache-2.0
//
// SIMD building blocks of cpu_flash: exp2, and the register-blocked products that take most of its
// time. Included once per instruction set by every source with SIMD code of cpu_flash.

#if defined(ATTEND_CPU_FLASH_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_MATH_INL_H_
#undef ATTEND_CPU_FLASH_MATH_INL_H_
#else
#define ATTEND_CPU_FLASH_MATH_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/target_kind.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether there are fp16 instructions that round to nearest even and keep NaN and Inf. Highway's
// emulation on other targets does neither.
#undef ATTEND_HAVE_F16
#if ATTEND_IS_AVX2_OR_LATER(HWY_TARGET) || HWY_TARGET == HWY_NEON
#define ATTEND_HAVE_F16 1
#else
#define ATTEND_HAVE_F16 0
#endif

using F32 = hn::ScalableTag<float>;
using V32 = hn::Vec<F32>;
constexpr int64_t kLanes = hn::MaxLanes(F32());

// Most vectors of query rows in a panel, and rows of the other operand in a block: as many
// accumulators as fit the register file beside the operands.
#if ATTEND_IS_AVX512(HWY_TARGET) || HWY_TARGET == HWY_NEON
constexpr int kPanelVectors = 3;
constexpr int kBlockRows = 8;
#else
constexpr int kPanelVectors = HWY_TARGET == HWY_AVX2 ? 3 : 2;
constexpr int kBlockRows = 4;
#endif
static_assert(kValueBlock % kBlockRows == 0 && kKeyTile % kBlockRows == 0);
static_assert(kPanelVectors * kLanes <= kPanelLanesMax);

// max(low, x), but NaN if x is NaN. Highway does not specify Max for NaN; x86 returns the second
// operand.
HWY_INLINE V32 AtLeast(V32 low, V32 x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Max(low, x);
#else
  return hn::IfThenElse(hn::Lt(x, low), low, x);
#endif
}

// min(high, x), but NaN if x is NaN.
HWY_INLINE V32 AtMost(V32 high, V32 x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Min(high, x);
#else
  return hn::IfThenElse(hn::Gt(x, high), high, x);
#endif
}

// 2^(x * factor) for x * factor <= 0 and finite factor > 0, within 1 ulp for the given x and
// factor. Results below the normal range are 0, except for a sliver of subnormal ones; -inf gives
// 0, NaN gives NaN. The product is not rounded separately and cannot overflow.
HWY_INLINE V32 Exp2(V32 x, float factor) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const V32 by = hn::Set(d, factor);
  // At -127 the exponent below reaches 0, and so does the result.
  x = AtLeast(hn::Set(d, -127.0f / factor), x);
  // Adding 1.5 * 2^23 + 127 leaves the biased exponent of 2^round(x) in the low bits, where 2^x =
  // 2^round(x) * 2^f and |f| <= 1/2.
  const V32 magic = hn::Set(d, 12582912.0f + 127.0f);
  const V32 shifted = hn::MulAdd(x, by, magic);
  const V32 f = hn::MulSub(x, by, hn::Sub(shifted, magic));
  // Minimax in relative error for 1 + f * polynomial: 0.3 units of roundoff.
  V32 p = hn::Set(d, 0.00015353361707892005f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.0013398874477472053f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.009618437358975426f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.055503324709253676f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022647913610015f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931472028551923f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  // A product, since adding to the exponent bits would turn a NaN into a number.
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// The cap of scores (problem.h), through their tanh.
struct LaneCap : ScoreCap<float> {
  explicit LaneCap(const Problem& p) : ScoreCap(CapOf(p)), inverse(on() ? 1.0f / value : 0.0f) {}
  V32 Tanh(V32 x) const { return hn::CallTanh(F32(), hn::Mul(x, hn::Set(F32(), inverse))); }
  V32 OfTanh(V32 x) const { return hn::Mul(hn::Set(F32(), value), x); }

  float inverse;
};

// Whether one instruction can add pairs of bf16 products, on machines that have it.
#if ATTEND_IS_AVX512(HWY_TARGET)
constexpr bool kHavePairs = true;
#else
constexpr bool kHavePairs = false;
#endif
using Words = hn::ScalableTag<uint16_t>;
using VWords = hn::Vec<Words>;

// sum + a * b over pairs of bf16: first the odd element's product, then the even one's, each sum
// rounded to nearest as by MulAdd. Subnormal inputs and sums are flushed to 0. Written in assembly,
// since only later versions of Highway have targets with this instruction.
HWY_INLINE V32 AddPairs(V32 sum, VWords a, VWords b) {
#if ATTEND_IS_AVX512(HWY_TARGET)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
#else
  static_cast<void>(a);
  static_cast<void>(b);
#endif
  return sum;
}

#if ATTEND_IS_AVX512(HWY_TARGET)

// Each lane's two numbers rounded to bf16, the even one in the lower half. In assembly, as
// AddPairs.
HWY_INLINE V32 RoundToPairs(V32 even, V32 odd) {
  alignas(64) static constexpr uint16_t kPairs[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const VWords order = hn::Load(Words(), kPairs);
  V32 pairs;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pairs.raw) : "v"(odd.raw), "v"(even.raw));
  asm("vpermw %0, %1, %0" : "+v"(pairs.raw) : "v"(order.raw));
  return pairs;
}

// Whether bf16 has subnormal numbers, finite ones of more than 2^`exponent`, NaN or Inf.
// `dim` is whole vectors.
struct RowTraits {
  bool tiny, large, special;
};
HWY_INLINE RowTraits TraitsOf(const uint16_t* row, int64_t dim, int exponent) {
  const Words d;
  const VWords bound = hn::Set(d, static_cast<uint16_t>(((127 + exponent) << 7) + 1));
  const VWords infinity = hn::Set(d, uint16_t{0x7f80}), one = hn::Set(d, uint16_t{1});
  VWords least = hn::Set(d, uint16_t{0xffff}), most = hn::Zero(d);
  const auto each = [&](const auto& look) {
    for (int64_t i = 0; i < dim; i += static_cast<int64_t>(hn::Lanes(d))) {
      look(hn::And(hn::LoadU(d, row + i), hn::Set(d, uint16_t{0x7fff})));
    }
  };
  each([&](VWords size) {
    least = hn::Min(least, hn::Sub(size, one));  // 0 becomes the largest
    most = hn::Max(most, size);
  });
  RowTraits traits{!hn::AllFalse(d, hn::Lt(least, hn::Set(d, uint16_t{0x7f}))), false, false};
  if (hn::AllTrue(d, hn::Lt(most, bound))) return traits;
  each([&](VWords size) {
    const auto finite = hn::Lt(size, infinity);
    traits.special = traits.special || !hn::AllTrue(d, finite);
    traits.large = traits.large || !hn::AllTrue(d, hn::Or(hn::Not(finite), hn::Lt(size, bound)));
  });
  return traits;
}

// The numbers of `low`, then those of `high`, rounded to bf16.
HWY_INLINE VWords RoundBoth(V32 low, V32 high) {
  VWords words;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words.raw) : "v"(high.raw), "v"(low.raw));
  return words;
}

#endif

// Whether AddPairs may be used for a row of Q, given as fp32 and padded with zeros to whole
// vectors. Its elements must be 0 or normal, so that none is lost however large K is, and at most
// 2^60, so that subnormal elements of K do not matter: with D <= 256 and |scale| <= 2^20, those and
// subnormal sums move a score by less than 2^(8 + 60 + 20 - 126) = 2^-38, where check_rows.h allows
// 2^-21 for each weight.
HWY_INLINE bool FitsPairs(const float* row, int64_t dim) {
  const F32 d;
  const V32 low = hn::Set(d, std::numeric_limits<float>::min());
  const V32 high = hn::Set(d, 0x1p60f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const V32 x = hn::Abs(hn::LoadU(d, row + i));
    const auto normal = hn::And(hn::Ge(x, low), hn::Le(x, high));
    if (!hn::AllTrue(d, hn::Or(normal, hn::Eq(x, hn::Zero(d))))) return false;
  }
  return true;
}

// Scores, with -inf where the mask's bit (as a bias of 0 or -inf) removes the key, even if the
// score is NaN.
HWY_INLINE V32 WithoutRemoved(V32 scores, const float* bias) {
  const F32 d;
  const V32 removed = hn::Load(d, bias);
  return hn::IfThenElse(hn::Lt(removed, hn::Zero(d)), removed, scores);
}

// Weights that Weigh adds one by one before their sum joins the row's. Equal weights round the same
// way each time, so the error of one long sum would grow far faster than a random walk.
constexpr int64_t kSummedKeys = 8;

// Turns the scores of `keys` keys and one panel into weights exp(s - base), and adds them to `sum`.
// With kSkip, hidden keys, whose score is -inf, get weight -0.
template <int kVectors, bool kSkip>
HWY_INLINE void Weigh(const V32 (&base)[kVectors], float to_log2, int64_t keys, float* s,
                      V32 (&sum)[kVectors]) {
  const F32 d;
  const V32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  V32 part[kVectors];
  HWY_UNROLL(4)
  for (int n = 0; n < kVectors; ++n) part[n] = hn::Zero(d);
  for (int64_t j = 0; j < keys; ++j) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      float* at = s + (j * kVectors + n) * kLanes;
      const V32 score = hn::Load(d, at);
      V32 p = Exp2(hn::Sub(score, base[n]), to_log2);
      if (kSkip) p = hn::IfThenElse(hn::Eq(score, hidden), hn::Set(d, -0.0f), p);
      hn::Store(p, d, at);
      part[n] = hn::Add(part[n], p);
    }
  }
  HWY_UNROLL(4)
  for (int n = 0; n < kVectors; ++n) sum[n] = hn::Add(sum[n], part[n]);
}

// Makes a weight usable in a product with Inf or NaN: never 0, and never subnormal, which is slow.
HWY_INLINE V32 NotZero(V32 weight) {
  return hn::Or(weight, hn::Set(F32(), std::numeric_limits<float>::min()));
}

// Calls f<vectors>() for a panel.
template <class F>
HWY_INLINE void WithVectors(int vectors, const F& f) {
  if (vectors == 1) return f.template operator()<1>();
  if (vectors == 2) return f.template operator()<2>();
  if constexpr (kPanelVectors > 2) f.template operator()<3>();
}

// Lanes of a panel of kVectors vectors.
template <int kVectors>
constexpr int64_t kPanelLanes = kVectors* kLanes;

// Whether a weight is -0, by its bits, since comparing would also accept +0.
HWY_INLINE auto IsHiddenWeight(V32 weight) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  return hn::RebindMask(d, hn::Eq(hn::BitCast(di, weight), hn::BitCast(di, hn::Set(d, -0.0f))));
}
HWY_INLINE bool IsHiddenWeight(float weight) { return weight == 0 && std::signbit(weight); }

// Scores of kBlockRows keys and one panel of query rows: s[r][lane] = sum over d of k[r][d] *
// q[d][lane], one fused multiply-add per product, in order of d. With kAdd, the sum is added to s;
// with kSkip, a k of -0 skips its q, even if that is NaN or Inf. q_stride is the distance between
// values of d, s_stride that between rows of s.
template <int kVectors, bool kAdd = false, bool kSkip = false>
HWY_INLINE void ScoreBlock(const float* const* k, const float* q, int64_t dim, float* s,
                           int64_t q_stride = kPanelLanes<kVectors>,
                           int64_t s_stride = kPanelLanes<kVectors>) {
  constexpr int kRows = kBlockRows;
  const F32 d;
  V32 sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::Zero(d);
  }
  for (int64_t i = 0; i < dim; ++i) {
    V32 row[kVectors];
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) row[n] = hn::Load(d, q + i * q_stride + n * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      if (kSkip && IsHiddenWeight(k[r][i])) continue;
      const V32 key = hn::Set(d, k[r][i]);
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::MulAdd(key, row[n], sum[r][n]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) {
      float* at = s + r * s_stride + n * kLanes;
      hn::Store(kAdd ? hn::Add(hn::Load(d, at), sum[r][n]) : sum[r][n], d, at);
    }
  }
}

// As ScoreBlock, in pairs: k has rows of bf16 words, q is a panel of [pair of dims][lane].
template <int kVectors>
HWY_INLINE void ScorePairs(const uint16_t* const* k, const float* q, int64_t dim, float* s) {
  constexpr int kRows = kBlockRows;
  constexpr int64_t kWidth = kPanelLanes<kVectors>;
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const Words dw;
  V32 sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::Zero(d);
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    VWords row[kVectors];
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) {
      row[n] = hn::BitCast(dw, hn::Load(d, q + i * kWidth + n * kLanes));
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      uint32_t pair;
      std::memcpy(&pair, k[r] + 2 * i, sizeof(pair));
      const VWords key = hn::BitCast(dw, hn::Set(du, pair));
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) sum[r][n] = AddPairs(sum[r][n], key, row[n]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) hn::Store(sum[r][n], d, s + r * kWidth + n * kLanes);
  }
}

// Updates kBlockRows dims of O for one panel: o[r][lane] = weight[lane] * o[r][lane] + sum over
// keys of p[key][lane] * v[key * v_stride + r]. The sum starts at zero and joins O once, since
// adding each term to the long sum would lose more with every key.
//
// With kSkip, a NaN or Inf in v reaches only rows that see its key, whose weight is not -0, and
// reaches them however small the weight: a weight that underflowed is +0, and 0 * Inf would be NaN
// (NotZero; not for factors that are no `weights`). Weights of finite values are multiplied by
// down[r][lane] unless `down` is null. Results are otherwise the same.
template <int kVectors, bool kSkip>
HWY_INLINE void OutputBlock(const float* v, const float* p, int64_t keys, const float* weight,
                            const float* down, float* o, int64_t v_stride = kValueBlock,
                            int64_t p_stride = kPanelLanes<kVectors>, bool weights = true) {
  constexpr int kRows = kBlockRows;
  constexpr int64_t kWidth = kPanelLanes<kVectors>;
  const F32 d;
  V32 sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::Zero(d);
  }
  for (int64_t j = 0; j < keys; ++j) {
    V32 row[kVectors], felt[kVectors];
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) {
      row[n] = hn::Load(d, p + j * p_stride + n * kLanes);
      if (kSkip) felt[n] = weights ? NotZero(row[n]) : row[n];
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const V32 value = hn::Set(d, v[j * v_stride + r]);
      HWY_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) {
        if (kSkip && !std::isfinite(v[j * v_stride + r])) {
          const V32 next = hn::MulAdd(value, felt[n], sum[r][n]);
          sum[r][n] = hn::IfThenElse(IsHiddenWeight(row[n]), sum[r][n], next);
        } else {
          const V32 by = kSkip && down != nullptr
                             ? hn::Mul(row[n], hn::Load(d, down + r * kWidth + n * kLanes))
                             : row[n];
          sum[r][n] = hn::MulAdd(value, by, sum[r][n]);
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int n = 0; n < kVectors; ++n) {
      float* at = o + r * kWidth + n * kLanes;
      const V32 before = hn::Load(d, at);
      V32 by = hn::Load(d, weight + n * kLanes);
      if (kSkip) by = hn::IfThenElse(hn::IsFinite(before), by, NotZero(by));
      hn::Store(hn::MulAdd(before, by, sum[r][n]), d, at);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
