// SPDX-License-Identifier: Apache-2.0
//
// SIMD building blocks of cpu_flash: exp2, and the register-blocked products that its time goes to.
// Included once per instruction set by every source that has SIMD code of cpu_flash.

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

#include "hwy/highway.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/target_kind.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Instructions for fp16, which round to nearest even and keep NaN and Inf. Highway's emulation on
// other targets does neither.
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
// accumulators as the register file holds beside the operands.
#if ATTEND_IS_AVX512(HWY_TARGET) || HWY_TARGET == HWY_NEON
constexpr int kPanelVectors = 3;
constexpr int kBlockRows = 8;
#else
constexpr int kPanelVectors = 2;
constexpr int kBlockRows = 4;
#endif
static_assert(kValueBlock % kBlockRows == 0 && kKeyTile % kBlockRows == 0);
static_assert(kPanelVectors * kLanes <= kPanelLanesMax);

// max(low, x), but NaN if x is: Highway leaves open what Max does with NaN, x86 keeps its second
// operand.
HWY_INLINE V32 AtLeast(V32 low, V32 x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Max(low, x);
#else
  return hn::IfThenElse(hn::Lt(x, low), low, x);
#endif
}

// min(high, x), but NaN if x is.
HWY_INLINE V32 AtMost(V32 high, V32 x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  return hn::Min(high, x);
#else
  return hn::IfThenElse(hn::Gt(x, high), high, x);
#endif
}

// 2^(x * factor) for x * factor <= 0 and a factor that is finite and above 0, to 1 ulp beside the
// roundings of x and factor; 0 for -inf and wherever the result would not be a normal number (but
// for a sliver of subnormal ones), NaN for any NaN. The product is never rounded by itself, nor can
// it overflow.
HWY_INLINE V32 Exp2(V32 x, float factor) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const V32 by = hn::Set(d, factor);
  // At -127 the exponent below reaches 0 and so does the result.
  x = AtLeast(hn::Set(d, -127.0f / factor), x);
  // Adding 1.5 * 2^23 leaves round(x) in the low bits, and 127 more the biased exponent of
  // 2^round(x), where 2^x = 2^round(x) * 2^f, |f| <= 1/2.
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
  // A product, as adding to the exponent's bits would make a number of a NaN.
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// Whether pairs of bf16 products can be added by one instruction, where the machine has it.
#if ATTEND_IS_AVX512(HWY_TARGET)
constexpr bool kHavePairs = true;
#else
constexpr bool kHavePairs = false;
#endif
using Words = hn::ScalableTag<uint16_t>;
using VWords = hn::Vec<Words>;

// sum + a * b over pairs of bf16: first the odd element's product, then the even one's, each sum
// rounded to nearest as by MulAdd. Subnormal numbers count as 0, sums so small become 0. Highway's
// targets that have the instruction are later than the versions that there are, and so it is
// written out.
HWY_INLINE V32 AddPairs(V32 sum, VWords a, VWords b) {
#if ATTEND_IS_AVX512(HWY_TARGET)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
#else
  static_cast<void>(a);
  static_cast<void>(b);
#endif
  return sum;
}

// Whether AddPairs may be used for a row of Q, as fp32 and padded with zeros to whole vectors: its
// elements are 0 or normal, so that none is lost however large K is, and at most 2^60, so that K's
// subnormal elements are nothing: with D <= 256 and |scale| <= 2^20 they and subnormal sums move a
// score by less than 2^(8 + 60 + 20 - 126) = 2^-38, where check_rows.h allows each weight 2^-21.
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

// Scores, but -inf where the mask's bit, as a bias of 0 or -inf, removes the key, be the score NaN.
HWY_INLINE V32 WithoutRemoved(V32 scores, const float* bias) {
  const F32 d;
  const V32 removed = hn::Load(d, bias);
  return hn::IfThenElse(hn::Lt(removed, hn::Zero(d)), removed, scores);
}

// Weights that Weigh adds one by one before their sum joins the others: equal ones round the same
// way each time, so a long sum of them would be off by far more than a random walk.
constexpr int64_t kSummedKeys = 8;

// Turns the scores of `keys` keys and one panel into weights exp(s - base), and adds them to `sum`.
// With kSkip, the weight of a key that is not seen, whose score is -inf, is -0.
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

// A weight for a product with Inf or NaN: not 0, nor subnormal, as such products are very slow.
HWY_INLINE V32 NotZero(V32 weight) {
  return hn::Or(weight, hn::Set(F32(), std::numeric_limits<float>::min()));
}

// Lanes of a panel of so many vectors.
template <int kVectors>
constexpr int64_t kPanelLanes = kVectors* kLanes;

// Whether a weight is -0, by its bits: comparing would take +0 for the same.
HWY_INLINE auto IsHiddenWeight(V32 weight) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  return hn::RebindMask(d, hn::Eq(hn::BitCast(di, weight), hn::BitCast(di, hn::Set(d, -0.0f))));
}
HWY_INLINE bool IsHiddenWeight(float weight) { return weight == 0 && std::signbit(weight); }

// Scores of kBlockRows keys and one panel of query rows: s[r][lane] = sum over d of
// k[r][d] * q[d][lane]. One fused multiply-add per product, first d first. With kAdd, the sum is
// added to what is there; with kSkip, a k of -0 takes nothing of q, be it NaN or Inf. Strides are
// from one d of the panel, and one row of s, to the next.
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

// As ScoreBlock, by pairs: k are rows of words, q is a panel of [pair of dims][lane].
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

// kBlockRows dims of O for one panel: o[r][lane] = weight[lane] * o[r][lane] + sum over keys of
// p[key][lane] * v[key * v_stride + r]. The sum is taken first, from zero: terms that are added
// one by one to the sum of many keys lose more with every further key. With kSkip, values that are
// NaN or Inf are felt by those rows alone that see their key, whose weight is not -0, and by these
// however small the weight: one that underflowed is +0, and 0 * Inf would be NaN. So it is of
// factors that are no `weights`. All are multiplied by down[r][lane], unless that is null. Results
// are otherwise the same.
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
