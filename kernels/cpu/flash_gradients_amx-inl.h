// SPDX-License-Identifier: Apache-2.0
//
// GradientRun with its five products in the tile unit, for bf16. All between the products is
// cpu_flash's, and so is the layout of sums. Included once per instruction set by
// flash_gradients_tile.cc; for those with AVX-512. Runs on any thread, on its own scratch.
//
//   S = Q K^T      dP = dO V^T          rows by [pair of dims][key]
//   dV^T += dO^T P   dK^T += Q^T dS     [dim][row] by [pair of rows][key]
//   dQ += dS K                          rows by [pair of keys][dim]
//
// P and dS are rounded to bf16 as factors. Products begin with each tile of rows and keys; their
// sums join dQ, dK and dV in fp32.
//
// The unit counts subnormal numbers as 0. Tiles take rows of Q, dO, K and V whose elements are 0 or
// normal and at most 2^26, and dO and dS times 2^32, so what is lost of a product other than a
// score is below 2^-158, or 2^-158 times an element where dS itself is; scores lose less than
// 2^-38, as in flash_amx-inl.h. Other rows, those that see such a key, and those that were
// measured, whose scores must be rounded as they were then, are computed by GradientRun after the
// tiles, one key tile at a time. For them tiles have zeros in place of the row or key.
//
// Tiles also take NaN and Inf of V, and those of Q and K as factors of scores, which then are not
// finite (or tanh's limits: not with a cap). As factors of dS, which must not reach hidden keys
// and rows, such rows of Q and K are 0: where they are seen, dS is NaN, or 0 for a score of -Inf.

#if defined(ATTEND_CPU_FLASH_GRADIENTS_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_GRADIENTS_AMX_INL_H_
#undef ATTEND_CPU_FLASH_GRADIENTS_AMX_INL_H_
#else
#define ATTEND_CPU_FLASH_GRADIENTS_AMX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/flash_gradients_run-inl.h"
#include "kernels/cpu/flash_gradients_tile-inl.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/tile_unit.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {
#if ATTEND_IS_AVX512(HWY_TARGET)

constexpr float kFactorScale = 0x1p32f;
constexpr uint16_t kFactorScaleBits = 32 << 7;

// kYes if all elements are 0 or normal, and at most 2^26, so that no sum of products of K, V, Q and
// dO leaves fp32's range, times kFactorScale or not. kSpecial if all others are NaN or Inf. `dim`
// is whole blocks.
enum class Fit : uint8_t { kNo, kSpecial, kYes };
HWY_INLINE Fit FitOf(const uint16_t* row, int64_t dim) {
  const RowTraits traits = TraitsOf(row, dim, 26);
  if (traits.tiny || traits.large) return Fit::kNo;
  return traits.special ? Fit::kSpecial : Fit::kYes;
}

HWY_INLINE void CopyRow(const void* data, int64_t index, int64_t dim, int64_t padded,
                        uint16_t* to) {
  const Words d;
  const auto* const from = static_cast<const uint16_t*>(data) + index;
  int64_t i = 0;  // no call for a few vectors
  for (; i + kAmxBlock <= dim; i += kAmxBlock) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  if (i < dim) std::memcpy(to + i, from + i, static_cast<size_t>(dim - i) * sizeof(uint16_t));
  std::fill(to + dim, to + padded, uint16_t{0});
}

// Elements [i, i + kLanes) of two rows in pairs, the first row's in the lower half.
HWY_INLINE V32 PairUp(const uint16_t* even, const uint16_t* odd, int64_t i) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const hn::Rebind<uint16_t, F32> dh;
  const auto low = hn::PromoteTo(du, hn::LoadU(dh, even + i));
  const auto high = hn::PromoteTo(du, hn::LoadU(dh, odd + i));
  return hn::BitCast(d, hn::Or(low, hn::ShiftLeft<16>(high)));
}

class AmxGradientRun : public GradientRun {
 public:
  AmxGradientRun(const GradientTask& task, GradientScratch* scratch)
      : GradientRun(task, scratch),
        unit_of_tiles_(CurrentTileUnit()),
        dim_(WholeBlocks(p_.dim)),
        dim_v_(WholeBlocks(p_.dim_v)) {}

  void Run() {
    unit_of_tiles_.begin();
    GradientRun::Run();
    unit_of_tiles_.end();
  }

 private:
  void LoadKeys() override;
  Fit LoadKey(int64_t j, uint16_t* k, uint16_t* v);
  void TileStep(int64_t first, int64_t count, const RowsKeys& seen) override;
  void LoadTileRows(int64_t first, int64_t count);
  bool LoadTileRow(int64_t n);
  bool SeesUnfit(int64_t n, Fit of_q) const;
  void Turn(const uint16_t* rows, int64_t count, int64_t dim, float* turned);
  template <int kVectors>
  void TilePanel(const LanePanel& panel, int64_t count, bool masked);
  template <int kVectors>
  void RoundFactors(const float* from, int64_t stride, int64_t count, float scale);
  template <int kVectors>
  void RoundScores(const LanePanel& panel, int64_t count);
  template <int kVectors>
  void AddTurned(const float* turned, int64_t dim, int64_t count, float* sums);
  void AddTileQueries(int64_t first, int64_t count, const KeyRange& lanes);

  const TileUnit& unit_of_tiles_;
  const int64_t dim_;    // padded
  const int64_t dim_v_;  // padded
  // Whether scores that are not finite leave nothing finite behind.
  bool TakesSpecial() const { return !CapOf(p_).on(); }

  bool any_unfit_ = false;
  bool any_special_ = false;   // some key in tiles has NaN or Inf
  bool special_rows_ = false;  // some row in tiles has, or its terms are
  bool wide_keys_ = false;     // GradientRun's key tile is loaded too
  int64_t others_ = 0;         // rows of the tile that GradientRun computes
};

// Packs K and V of the key tile.
void AmxGradientRun::LoadKeys() {
  any_unfit_ = any_special_ = wide_keys_ = false;
  auto* const k = reinterpret_cast<uint16_t*>(s_.rows);
  uint16_t v[kTurned * 2 * kRowStride];
  for (int64_t j = 0; j < WholeBlocks(keys_); j += kTurned) {
    Fit fits[kTurned];
    for (int64_t r = 0; r < kTurned; ++r) {
      fits[r] = LoadKey(j + r, k + r * 2 * kRowStride, v + r * 2 * kRowStride);
    }
    const LanePanel panel = PanelOf(keys_, j / kAmxPanelLanes, true);
    const int64_t at = j - panel.lane;
    if (at < panel.width()) {
      TurnIn(s_.rows, kRowStride, dim_ / 2, panel.width(), s_.amx_k + panel.lane * dim_ / 2 + at);
      TurnIn(reinterpret_cast<const float*>(v), kRowStride, dim_v_ / 2, panel.width(),
             s_.amx_v + panel.lane * dim_v_ / 2 + at);
    }
    for (int64_t r = 0; r < kTurned; ++r) {
      if (fits[r] == Fit::kSpecial) std::fill_n(k + r * 2 * kRowStride, dim_, uint16_t{0});
    }
    for (int64_t r = 0; r < kTurned; r += 2) {
      for (int64_t i = 0; i < dim_; i += kLanes) {
        const int64_t block = i / kAmxBlock * (kGradientKeys / 2) + (j + r) / 2;
        hn::Store(PairUp(k + r * 2 * kRowStride, k + (r + 1) * 2 * kRowStride, i), F32(),
                  s_.amx_k_pairs + block * kAmxBlock + i % kAmxBlock);
      }
    }
  }
}

// Loads one key's K and V, and its norm. Zeros in place of a key that tiles cannot take. Returns
// how its K fits.
Fit AmxGradientRun::LoadKey(int64_t j, uint16_t* k, uint16_t* v) {
  const int64_t h_kv = task_.head / p_.group();
  s_.norms[j] = 0;
  s_.unfit[j] = 0;
  if (j < keys_) {
    CopyRow(a_.k.data, KeyElement(a_, a_.k, sequence_, task_.b, h_kv, tile_ + j), p_.dim, dim_, k);
    CopyRow(a_.v.data, KeyElement(a_, a_.v, sequence_, task_.b, h_kv, tile_ + j), p_.dim_v, dim_v_,
            v);
    HWY_ALIGN float wide[kHeadDimMax];
    WidenRow(k, DType::kBFloat16, 0, dim_, wide);
    const float square = DotRows(wide, wide, dim_);
    if (std::isfinite(square)) s_.norms[j] = std::sqrt(square);
    const Fit of_k = FitOf(k, dim_), of_v = FitOf(v, dim_v_);
    if (of_v != Fit::kNo && (of_k == Fit::kYes || (of_k == Fit::kSpecial && TakesSpecial()))) {
      any_special_ = any_special_ || of_k == Fit::kSpecial || of_v == Fit::kSpecial;
      return of_k;
    }
    s_.unfit[j] = AllFinite(wide, dim_) ? 1 : 2;
    any_unfit_ = true;
  }
  std::fill(k, k + dim_, uint16_t{0});
  std::fill(v, v + dim_v_, uint16_t{0});
  return Fit::kYes;
}

// Whether row n of the tile sees a key that tiles cannot take. A bias of -inf does not hide a score
// that may not be finite.
bool AmxGradientRun::SeesUnfit(int64_t n, Fit of_q) const {
  const float* const bias = s_.bias + n * kGradientKeys;
  for (auto j = static_cast<int64_t>(s_.begin[n]); j < static_cast<int64_t>(s_.end[n]); ++j) {
    if (s_.unfit[j] == 0) continue;
    const bool removed = p_.has_bias && bias[j] == -std::numeric_limits<float>::infinity() &&
                         (bits_ || (s_.unfit[j] == 1 && of_q == Fit::kYes));
    if (!removed) return true;
  }
  return false;
}

// Packs row n of the tile, which is loaded but for its Q and dO. False if tiles cannot take it.
bool AmxGradientRun::LoadTileRow(int64_t n) {
  const RowId id = IdOf(s_.row[n]);
  uint16_t* const q = s_.amx_q + n * kAmxRowStride;
  uint16_t* const d_o = s_.amx_d_o + n * kAmxRowStride;
  const auto copy = [&](const ConstTensorView& view, int64_t dim, uint16_t* to) {
    const int64_t at =
        RowElement(sequence_, id.b, id.h, id.i, view.stride_b, view.stride_h, view.stride_l);
    CopyRow(view.data, at, dim, WholeBlocks(dim), to);
    return FitOf(to, WholeBlocks(dim));
  };
  const Fit of_q = copy(a_.q, p_.dim, q);
  const Fit of_d_o = copy(g_.d_o, p_.dim_v, d_o);
  const RowTerms& terms = *s_.terms[n];
  const bool measured =
      task_.measured != nullptr && task_.measured[TermsIndex(p_, sequence_, id)].known;
  const bool fits_q = of_q == Fit::kYes || (of_q == Fit::kSpecial && TakesSpecial());
  if (!fits_q || of_d_o != Fit::kYes || measured || (any_unfit_ && SeesUnfit(n, of_q)))
    return false;
  if (NoteSpecial(n) || !std::isfinite(terms.less) || !std::isfinite(terms.base)) {
    special_rows_ = true;
  }
  const Words d;
  for (int64_t i = 0; i < dim_v_; i += kAmxBlock) {
    const VWords x = hn::LoadU(d, d_o + i);
    const auto zero = hn::Eq(hn::ShiftLeft<1>(x), hn::Zero(d));
    const VWords scaled = hn::Add(x, hn::Set(d, kFactorScaleBits));
    hn::StoreU(hn::IfThenElse(zero, x, scaled), d, d_o + i);
  }
  return true;
}

void AmxGradientRun::LoadTileRows(int64_t first, int64_t count) {
  static constexpr RowTerms kNone{.known = true};
  others_ = 0;
  special_rows_ = false;
  HWY_ALIGN uint16_t special[kGradientRows * kHeadDimMax];  // rows of Q
  int64_t at[kGradientRows];
  int64_t specials = 0;
  for (int64_t n = 0; n < WholeBlocks(count); ++n) {
    if (n < count) {
      LoadRow(RowAt(first + n), n, /*wide=*/false);
      uint16_t* const q = s_.amx_q + n * kAmxRowStride;
      if (LoadTileRow(n)) {
        if (!s_.terms[n]->special || FitOf(q, dim_) == Fit::kYes) continue;
        std::copy(q, q + dim_, special + specials * kHeadDimMax);
        std::fill_n(q, dim_, uint16_t{0});
        at[specials++] = n;
        continue;
      }
      s_.others[others_++] = static_cast<int32_t>(s_.row[n]);
      s_.begin[n] = s_.end[n] = 0;
      s_.terms[n] = &kNone;
    }
    std::fill_n(s_.amx_q + n * kAmxRowStride, dim_, uint16_t{0});
    std::fill_n(s_.amx_d_o + n * kAmxRowStride, dim_v_, uint16_t{0});
  }
  if (task_.d_k != nullptr) Turn(s_.amx_q, count, dim_, s_.amx_q_turned);
  if (task_.d_v != nullptr) Turn(s_.amx_d_o, count, dim_v_, s_.amx_d_o_turned);
  for (int64_t n = 0; n < specials; ++n) {
    std::copy_n(special + n * kHeadDimMax, dim_, s_.amx_q + at[n] * kAmxRowStride);
  }
}

// Transposes the tile's rows in pairs.
void AmxGradientRun::Turn(const uint16_t* rows, int64_t count, int64_t dim, float* turned) {
  for (int64_t n = 0; n < WholeBlocks(count); n += 2 * kTurned) {
    for (int64_t r = 0; r < kTurned; ++r) {
      const uint16_t* const even = rows + (n + 2 * r) * kAmxRowStride;
      for (int64_t i = 0; i < dim; i += kLanes) {
        hn::Store(PairUp(even, even + kAmxRowStride, i), F32(), s_.rows + r * kRowStride + i);
      }
    }
    TurnIn(s_.rows, kRowStride, dim, kAmxTurnedStride, turned + n / 2);
  }
}

void AmxGradientRun::TileStep(int64_t first, int64_t count, const RowsKeys& seen) {
  LoadTileRows(first, count);
  careful_ = any_special_ || special_rows_;
  in_tiles_ = true;
  sums_begun_ = false;
  d_weight_unit_ = 1 / kFactorScale;
  KeyRange lanes{keys_, 0};
  for (int64_t n = 0; n < CountPanels(keys_, true); ++n) {
    const LanePanel panel = PanelOf(keys_, n, true);
    const int64_t begin = tile_ + panel.lane, end = begin + panel.width();
    if (seen.any.begin >= std::min(end, tile_ + keys_) || seen.any.end <= begin) continue;
    const bool masked = others_ > 0 || seen.all.begin > begin || seen.all.end < end;
    panel.vectors == 1 ? TilePanel<1>(panel, count, masked) : TilePanel<2>(panel, count, masked);
    lanes = {std::min(lanes.begin, panel.lane), end - tile_};
  }
  if (sums_begun_) StoreSums(count);
  if (task_.d_q != nullptr && lanes.begin < lanes.end) AddTileQueries(first, count, lanes);
  if (others_ == 0) return;
  if (!wide_keys_) {
    HWY_ALIGN float norms[kGradientKeys];  // GradientRun rounds them otherwise
    std::copy(s_.norms, s_.norms + kGradientKeys, norms);
    GradientRun::LoadKeys();
    std::copy(norms, norms + kGradientKeys, s_.norms);
    wide_keys_ = true;
  }
  d_weight_unit_ = 1;
  in_tiles_ = false;
  listed_ = s_.others;
  GradientRun::TileStep(0, others_, {seen.any, {0, 0}});
  listed_ = nullptr;
}

template <int kVectors>
HWY_NOINLINE void AmxGradientRun::TilePanel(const LanePanel& panel, int64_t count, bool masked) {
  constexpr int64_t kWidth = kPanelLanes<kVectors>;
  for (int64_t t = 0; t < count; t += kAmxBlock) {
    unit_of_tiles_.multiply(s_.amx_q + t * kAmxRowStride, kAmxRowStride * 2,
                            s_.amx_k + panel.lane * dim_ / 2, dim_ / kAmxBlock, kVectors,
                            s_.weight + t * kWidth);
    unit_of_tiles_.multiply(s_.amx_d_o + t * kAmxRowStride, kAmxRowStride * 2,
                            s_.amx_v + panel.lane * dim_v_ / 2, dim_v_ / kAmxBlock, kVectors,
                            s_.d_weight + t * kWidth);
  }
  if (!plain_) FinishScores(panel, count);
  if (p_.dropout > 0) {
    Draw(panel, count);
    WeighOrMeasure<kVectors, true>(panel, count, masked);
  } else {
    WeighOrMeasure<kVectors, false>(panel, count, masked);
  }
  if (task_.d_bias) AddBias(panel, count);
  if (CapOf(p_).on()) Slope(panel, count);
  const int64_t at = tile_ - task_.keys.begin + panel.lane;
  if (task_.d_v != nullptr) {
    RoundFactors<kVectors>(s_.weight, kWidth, count, 1);
    AddTurned<kVectors>(s_.amx_d_o_turned, p_.dim_v, count, task_.d_v + at * PaddedDim(p_.dim_v));
  }
  if (task_.d_k != nullptr) {
    RoundFactors<kVectors>(s_.d_score + panel.lane, kGradientKeys, count, kFactorScale);
    AddTurned<kVectors>(s_.amx_q_turned, p_.dim, count, task_.d_k + at * PaddedDim(p_.dim));
  }
  if (task_.d_q != nullptr) RoundScores<kVectors>(panel, count);
}

// Rounds a panel of P or dS to [pair of rows][lane], with zeros up to whole blocks of rows.
template <int kVectors>
HWY_NOINLINE void AmxGradientRun::RoundFactors(const float* from, int64_t stride, int64_t count,
                                               float scale) {
  const F32 d;
  const V32 by = hn::Set(d, scale);
  for (int64_t t = 0; t < WholeBlocks(count); t += 2) {
    HWY_UNROLL(2)
    for (int64_t n = 0; n < kPanelLanes<kVectors>; n += kLanes) {
      const float* const at = from + t * stride + n;
      const V32 even = t < count ? hn::Mul(hn::Load(d, at), by) : hn::Zero(d);
      const V32 odd = t + 1 < count ? hn::Mul(hn::Load(d, at + stride), by) : hn::Zero(d);
      hn::Store(RoundToPairs(even, odd), d, s_.amx_factors + t / 2 * kPanelLanes<kVectors> + n);
    }
  }
}

// Rounds a panel of dS to [row][key], with zeros up to a whole block of keys.
template <int kVectors>
HWY_NOINLINE void AmxGradientRun::RoundScores(const LanePanel& panel, int64_t count) {
  const F32 d;
  const V32 by = hn::Set(d, kFactorScale);
  for (int64_t t = 0; t < WholeBlocks(count); ++t) {
    const float* const at = s_.d_score + t * kGradientKeys + panel.lane;
    V32 low = hn::Zero(d), high = hn::Zero(d);
    if (t < count) low = hn::Mul(hn::Load(d, at), by);
    if (t < count && kVectors == 2) high = hn::Mul(hn::Load(d, at + kLanes), by);
    hn::Store(RoundBoth(low, high), Words(), s_.amx_d_score + t * kAmxScoreStride + panel.lane);
  }
}

// sums[d][lane] += sum over rows of rows[row][d] times the rounded factors: dV, or dK.
template <int kVectors>
HWY_NOINLINE void AmxGradientRun::AddTurned(const float* turned, int64_t dim, int64_t count,
                                            float* sums) {
  const F32 d;
  const V32 scale = hn::Set(d, 1 / kFactorScale);
  for (int64_t i = 0; i < PaddedDim(dim); i += kAmxBlock) {
    unit_of_tiles_.multiply(turned + i * kAmxTurnedStride, kAmxTurnedStride * 4, s_.amx_factors,
                            WholeBlocks(count) / kAmxBlock, kVectors, s_.amx_product);
    float* const to = sums + i * kPanelLanes<kVectors>;
    const int64_t size = std::min(kAmxBlock, PaddedDim(dim) - i) * kPanelLanes<kVectors>;
    for (int64_t n = 0; n < size; n += kLanes) {
      const V32 product = hn::Load(d, s_.amx_product + n);
      hn::Store(hn::MulAdd(product, scale, hn::Load(d, to + n)), d, to + n);
    }
  }
}

// dQ += dS K over the lanes, whose panels are rounded.
void AmxGradientRun::AddTileQueries(int64_t first, int64_t count, const KeyRange& lanes) {
  const F32 d;
  const V32 scale = hn::Set(d, 1 / kFactorScale);
  const int64_t dim = PaddedDim(p_.dim);
  for (int64_t t = 0; t < count; t += kAmxBlock) {
    for (int64_t i = 0; i < dim; i += kAmxBlock) {
      const int64_t block = i / kAmxBlock * (kGradientKeys / 2) + lanes.begin / 2;
      unit_of_tiles_.multiply(s_.amx_d_score + t * kAmxScoreStride + lanes.begin,
                              kAmxScoreStride * 2, s_.amx_k_pairs + block * kAmxBlock,
                              WholeBlocks(lanes.end - lanes.begin) / kAmxBlock, 2, s_.amx_product);
      for (int64_t r = 0; r < std::min(kAmxBlock, count - t); ++r) {
        float* const to = task_.d_q + (first + t + r) * dim + i;
        for (int64_t n = 0; n < std::min(kAmxBlock, dim - i); n += kLanes) {
          const V32 product = hn::Load(d, s_.amx_product + r * kAmxBlock + n);
          hn::Store(hn::MulAdd(product, scale, hn::Load(d, to + n)), d, to + n);
        }
      }
    }
  }
}

#endif  // ATTEND_IS_AVX512

bool RunsTiles() { return ATTEND_IS_AVX512(HWY_TARGET); }

void RunGradients(const GradientTask& task, GradientScratch* scratch) {
#if ATTEND_IS_AVX512(HWY_TARGET)
  if (task.amx && task.step == GradientStep::kAdd) return AmxGradientRun(task, scratch).Run();
#endif
  GradientRun(task, scratch).Run();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
