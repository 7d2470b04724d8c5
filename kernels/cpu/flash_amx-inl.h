// SPDX-License-Identifier: Apache-2.0
//
// One tile of query rows as cpu_flash_amx computes it: TileRun with both products in the tile unit.
// Query rows lie across lanes there too, S^T = K Q^T and O^T = V^T P^T, so that all between the
// products is cpu_flash's. Included once per instruction set by flash_tile.cc; for those with
// AVX-512. Runs on any thread, on its own Scratch.
//
//   K    [key][dim], padded with zeros         Q    panels of [pair of dims][lane]
//   V^T  [dim][pair of keys], times 2^32       P^T  panels of [pair of keys][lane], over S^T
//
// Where a chain of products begins depends on a key's number alone: key tiles begin at multiples of
// kAmxKeys and, where no row of the tile sees the first ones, of kAmxBlock. Keys that a row does
// not see have weight 0 and finite values, and a column of a product depends on no other, so that
// no row feels them or the rows beside it.
//
// Subnormal numbers count as 0 in the unit. Of a row of Q that passes FitsPairs this moves a score
// by less than 2^-38, as of pairs. V is packed times 2^32, which is exact, and makes subnormal
// values normal ones; so a sum of weights times V over n keys loses n 2^-157 at most. Weights below
// 2^-126 count as 0 in every kernel.
//
// NaN and Inf of V are 0 in tiles. What a row makes of those that it sees, by bits, is Inf of
// either sign, or both (NaN), and joins O before it is stored. NaN and Inf of Q and K are in tiles,
// as IEEE says, and settle a row: none of its output is left to chance.
//
// Rows that tiles cannot compute are computed by RunTile, as cpu_flash does, after the others:
// those that fail FitsPairs though finite, those that see a finite V of 2^95 or more, and those
// that come out not finite and not settled.

#if defined(ATTEND_CPU_FLASH_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_AMX_INL_H_
#undef ATTEND_CPU_FLASH_AMX_INL_H_
#else
#define ATTEND_CPU_FLASH_AMX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/flash_tile-inl.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/flash_tile_run-inl.h"
#include "kernels/cpu/tile_unit.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {
#if ATTEND_IS_AVX512(HWY_TARGET)

constexpr float kValueScale = 0x1p32f;

// A row's state in s_.unpaired.
constexpr float kFits = 0;
constexpr float kSettled = -1;  // Q, or a score, is NaN or Inf because an input is
constexpr float kOther = 1;     // RunTile computes it

constexpr int64_t kWordKeys = 32;
constexpr int64_t kWords = kAmxKeys / kWordKeys;

// One bit for each key of a tile.
struct KeyBits {
  uint32_t at[kWords] = {};
  void Set(int64_t key) { at[key / kWordKeys] |= uint32_t{1} << key % kWordKeys; }
  bool Has(int64_t key) const { return (at[key / kWordKeys] >> key % kWordKeys & 1) != 0; }
};

class AmxRun : public TileRun {
 public:
  AmxRun(const Tile& tile, Scratch* scratch)
      : TileRun(tile, scratch, kAmxPanelLanes / kLanes),
        unit_(CurrentTileUnit()),
        dim_(WholeBlocks(p_.dim)),
        dim_v_(WholeBlocks(p_.dim_v)) {}

  void Run() {
    if (Stopped(tile_.stop)) return;
    MakePanels();
    PackQuery();
    unit_.begin();
    Attend();
    unit_.end();
    if (Stopped(tile_.stop)) return;
    FindOthers();
    if (any_felt_) AddFelt();
    Store();
    RunOthers();
  }

 private:
  void PackQuery();
  void Attend();
  void LoadKeys(int64_t j, int64_t keys);
  V32 LoadValues(const uint16_t* row, int64_t i) const;
  void LoadValuePair(const uint16_t* even, const uint16_t* odd, float* pairs, int64_t key);
  void MarkValues(const uint16_t* row, int64_t key);
  template <int kVectors>
  void PanelStep(const Panel& panel, int64_t j, int64_t keys);
  void Settle(const Panel& panel, int64_t keys);
  template <int kVectors>
  void Feel(const Panel& panel, int64_t keys);
  template <int kVectors>
  void Output(const Panel& panel, int64_t keys);
  void AddFelt();
  void FindOthers();
  void RunOthers();

  const TileUnit& unit_;
  const int64_t dim_;    // padded
  const int64_t dim_v_;  // padded
  // Bits of the current keys: K has NaN or Inf; K has elements whose products with Inf may be
  // wrong; V has finite elements of 2^95 or more.
  KeyBits infinite_, unsure_, large_;
  bool look_at_scores_ = false;  // some key is in the first two
  // V of the current keys, by column: is +Inf or NaN, and is -Inf or NaN.
  alignas(64) uint32_t spoilt_[2][kWords][kHeadDimMax];
  bool any_spoilt_ = false;  // there are such, or some key is in large_
  // Rows that saw such an element, by vector of rows and column, as bits of a mask.
  static constexpr int64_t kMaskBytes = kLanes / 8;
  uint8_t felt_[2][kRowTile * kHeadDimMax / kLanes * kMaskBytes + 8];
  bool any_felt_ = false;
};

void AmxRun::PackQuery() {
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    for (int64_t first = 0; first < panel.width(); first += kTurned) {
      for (int64_t r = 0; r < kTurned; ++r) {
        const int64_t lane = panel.lane + first + r;
        std::fill(s_.rows, s_.rows + dim_, 0.0f);
        if (Real(lane)) WidenRow(a_.q.data, p_.dtype, QueryOf(lane), p_.dim, s_.rows);
        s_.unpaired[lane] = kFits;
        if (FitsPairs(s_.rows, dim_)) continue;
        for (int64_t i = 0; i < dim_; ++i) {
          if (std::isfinite(s_.rows[i])) continue;
          s_.rows[i] = 0;
          s_.unpaired[lane] = kSettled;
        }
        const bool fits = s_.unpaired[lane] == kSettled && FitsPairs(s_.rows, dim_);
        if (!fits) s_.unpaired[lane] = kOther;
      }
      PackPairs(panel, first, dim_);
    }
  }
}

void AmxRun::Attend() {
  std::fill(s_.max, s_.max + vectors_ * kLanes, kMinusInfinity);
  std::fill(s_.sum, s_.sum + vectors_ * kLanes, 0.0f);
  std::memset(s_.o, 0, sizeof(float) * static_cast<size_t>(vectors_ * kLanes * dim_v_padded_));
  int64_t begin = keys_.begin - keys_.begin % kAmxBlock;
  while (begin < keys_.end && !Stopped(tile_.stop)) {
    const int64_t end = std::min(keys_.end, (begin / kAmxKeys + 1) * kAmxKeys);
    LoadKeys(begin, end - begin);
    for (int64_t n = 0; n < panel_count_; ++n) {
      const Panel& panel = panels_[n];
      if (panel.any.begin >= end || panel.any.end <= begin) continue;
      const int64_t keys = std::min(end, panel.any.end) - begin;
      panel.vectors == 1 ? PanelStep<1>(panel, begin, keys) : PanelStep<2>(panel, begin, keys);
    }
    begin = end;
  }
}

// Packs K and V of keys [j, j + keys), with zeros up to whole blocks.
void AmxRun::LoadKeys(int64_t j, int64_t keys) {
  const int64_t h = tile_.head / p_.group();
  alignas(64) static constexpr uint16_t kZeros[kHeadDimMax] = {};
  const auto row = [&](const ConstTensorView& view, int64_t n) {
    if (n >= keys) return kZeros;
    const int64_t at = KeyElement(a_, view, sequence_, tile_.b, h, j + n);
    return static_cast<const uint16_t*>(view.data) + at;
  };
  for (int64_t n = 0; n < WholeBlocks(keys); ++n) {
    uint16_t* const to = s_.amx_k + n * dim_;
    std::memcpy(to, row(a_.k, n), static_cast<size_t>(p_.dim) * sizeof(uint16_t));
    std::fill(to + p_.dim, to + dim_, uint16_t{0});
  }
  const auto look = [&](int64_t n, int64_t count) {
    const RowTraits traits = TraitsOf(s_.amx_k + n * dim_, count * dim_, 58);
    // Sums of products of finite elements stay finite if none is large. Inf times a subnormal one,
    // which counts as 0, is NaN in tiles.
    if (traits.special && !traits.large) infinite_.Set(n);
    if (traits.large || traits.tiny) unsure_.Set(n);
    return traits.special || traits.large || traits.tiny;
  };
  look_at_scores_ = look(0, keys);
  infinite_ = unsure_ = large_ = KeyBits();
  for (int64_t n = 0; n < keys && look_at_scores_; ++n) look(n, 1);
  any_spoilt_ = false;
  for (int64_t n = 0; n < WholeBlocks(keys); n += 2 * kTurned) {
    for (int64_t r = 0; r < kTurned; ++r) {
      const int64_t key = n + 2 * r;
      LoadValuePair(row(a_.v, key), row(a_.v, key + 1), s_.rows + r * kHeadDimMax, key);
    }
    TurnIn(s_.rows, kHeadDimMax, dim_v_, kAmxValueStride, s_.amx_v + n / 2);
  }
}

// Columns [i, i + kLanes) of a row of V; 0 beyond the last one.
HWY_INLINE V32 AmxRun::LoadValues(const uint16_t* row, int64_t i) const {
  const F32 d;
  alignas(64) uint16_t last[kLanes] = {};
  if (i + kLanes > p_.dim_v) {
    const int64_t columns = std::max<int64_t>(0, p_.dim_v - i);
    std::memcpy(last, row + i, static_cast<size_t>(columns) * sizeof(uint16_t));
    row = last, i = 0;
  }
  return LoadWide<DType::kBFloat16>(d, row, i);
}

// Packs two keys' rows of V, times 2^32, column by column. Elements that are then not finite are
// packed as 0 and marked.
HWY_INLINE void AmxRun::LoadValuePair(const uint16_t* even, const uint16_t* odd, float* pairs,
                                      int64_t key) {
  const F32 d;
  const V32 scale = hn::Set(d, kValueScale);
  const hn::RebindToUnsigned<F32> du;
  auto fine_even = hn::Eq(hn::Zero(d), hn::Zero(d)), fine_odd = fine_even;
  for (int64_t i = 0; i < dim_v_; i += kLanes) {
    const V32 x = hn::Mul(LoadValues(even, i), scale), y = hn::Mul(LoadValues(odd, i), scale);
    const auto fine_x = hn::IsFinite(x), fine_y = hn::IsFinite(y);
    const auto lower = hn::BitCast(du, hn::IfThenElseZero(fine_x, x));
    const auto upper = hn::BitCast(du, hn::IfThenElseZero(fine_y, y));
    hn::Store(hn::BitCast(d, hn::Or(hn::ShiftRight<16>(lower), upper)), d, pairs + i);
    fine_even = hn::And(fine_even, fine_x);
    fine_odd = hn::And(fine_odd, fine_y);
  }
  if (!hn::AllTrue(d, fine_even)) MarkValues(even, key);
  if (!hn::AllTrue(d, fine_odd)) MarkValues(odd, key + 1);
}

HWY_NOINLINE void AmxRun::MarkValues(const uint16_t* row, int64_t key) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const V32 infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  const auto bit = hn::Set(du, uint32_t{1} << key % kWordKeys);
  if (!any_spoilt_) std::memset(spoilt_, 0, sizeof(spoilt_));
  any_spoilt_ = true;
  for (int64_t i = 0; i < dim_v_; i += kLanes) {
    const V32 x = LoadValues(row, i);
    const auto mark = [&](const auto& these, uint32_t* at) {
      const auto marked = hn::IfThenElseZero(hn::RebindMask(du, these), bit);
      hn::Store(hn::Or(hn::Load(du, at), marked), du, at);
    };
    mark(hn::Or(hn::IsNaN(x), hn::Eq(x, infinity)), spoilt_[0][key / kWordKeys] + i);
    mark(hn::Or(hn::IsNaN(x), hn::Eq(x, hn::Neg(infinity))), spoilt_[1][key / kWordKeys] + i);
    const auto fits =
        hn::Or(hn::IsFinite(hn::Mul(x, hn::Set(d, kValueScale))), hn::Not(hn::IsFinite(x)));
    if (!hn::AllTrue(d, fits)) large_.Set(key);
  }
}

template <int kVectors>
HWY_NOINLINE void AmxRun::PanelStep(const Panel& panel, int64_t j, int64_t keys) {
  const bool masked = j < panel.all.begin || j + keys > panel.all.end;
  if (p_.has_bias) LoadBias(panel, j, keys);
  if (masked || p_.has_alibi) LoadLanes(panel, j, keys);
  for (int64_t n = 0; n < keys; n += kAmxBlock) {
    unit_.multiply(s_.amx_k + n * dim_, dim_ * 2, s_.q_pairs + panel.lane * (dim_ / 2),
                   dim_ / kAmxBlock, kVectors, s_.s + n * panel.width());
  }
  if (!plain_) FinishScores(panel, keys);
  if (masked) MaskScores(panel, keys);
  if (look_at_scores_) Settle(panel, keys);
  any_spoilt_ ? Softmax<kVectors, true>(panel, j, keys) : Softmax<kVectors, false>(panel, j, keys);
  if (p_.dropout > 0) Drop(panel, j, keys);
  if (any_spoilt_) Feel<kVectors>(panel, keys);
  Output<kVectors>(panel, keys);
}

// Finds rows whose scores are NaN or +Inf because K is, and those whose scores may be NaN though
// Q's Inf makes them Inf.
void AmxRun::Settle(const Panel& panel, int64_t keys) {
  const F32 d;
  const V32 infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  const V32 fits = hn::Set(d, kFits), settled = hn::Set(d, kSettled), other = hn::Set(d, kOther);
  for (int64_t j = 0; j < keys; ++j) {
    const bool infinite = infinite_.Has(j), unsure = unsure_.Has(j);
    if (!infinite && !unsure) continue;
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      const V32 score = hn::Load(d, s_.s + j * panel.width() + n);
      const auto nan = hn::IsNaN(score);
      float* const at = s_.unpaired + panel.lane + n;
      V32 row = hn::Load(d, at);
      if (unsure) row = hn::IfThenElse(hn::And(nan, hn::Eq(row, settled)), other, row);
      const auto lost = hn::Or(nan, hn::Eq(score, infinity));
      if (infinite) row = hn::IfThenElse(hn::And(lost, hn::Eq(row, fits)), settled, row);
      hn::Store(row, d, at);
    }
  }
}

// Notes what rows see of V that tiles do not have, however small its weight.
template <int kVectors>
HWY_NOINLINE void AmxRun::Feel(const Panel& panel, int64_t keys) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  using Bits = hn::Vec<decltype(du)>;
  if (!any_felt_) std::memset(felt_, 0, sizeof(felt_));
  any_felt_ = true;
  for (int64_t n = 0; n < kVectors; ++n) {
    Bits seen[kWords];
    Bits large = hn::Zero(du);
    for (int64_t w = 0; w < kWords; ++w) {
      seen[w] = hn::Zero(du);
      for (int64_t j = w * kWordKeys; j < std::min(keys, (w + 1) * kWordKeys); ++j) {
        const auto hidden = IsHiddenWeight(hn::Load(d, s_.s + (j * kVectors + n) * kLanes));
        const Bits bit = hn::Set(du, uint32_t{1} << j % kWordKeys);
        seen[w] = hn::Or(seen[w], hn::IfThenZeroElse(hn::RebindMask(du, hidden), bit));
      }
      large = hn::Or(large, hn::And(seen[w], hn::Set(du, large_.at[w])));
    }
    const int64_t lane = panel.lane + n * kLanes;
    const auto others = hn::RebindMask(d, hn::Ne(large, hn::Zero(du)));
    const V32 before = hn::Load(d, s_.unpaired + lane);
    hn::Store(hn::IfThenElse(others, hn::Set(d, kOther), before), d, s_.unpaired + lane);
    for (int sign = 0; sign < 2; ++sign) {
      uint8_t* at = felt_[sign] + lane / kLanes * p_.dim_v * kMaskBytes;
      for (int64_t i = 0; i < p_.dim_v; ++i, at += kMaskBytes) {
        Bits felt = hn::Zero(du);
        for (int64_t w = 0; w < kWords; ++w) {
          felt = hn::Or(felt, hn::And(seen[w], hn::Set(du, spoilt_[sign][w][i])));
        }
        const auto now = hn::RebindMask(d, hn::Ne(felt, hn::Zero(du)));
        hn::StoreMaskBits(d, hn::Or(hn::LoadMaskBits(d, at), now), at);
      }
    }
  }
}

// Rounds the weights, in place, and adds their products with V to O. The products of a key tile
// have a sum of their own, as in OutputBlock.
template <int kVectors>
void AmxRun::Output(const Panel& panel, int64_t keys) {
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 d;
  std::fill(s_.s + keys * kWidth, s_.s + WholeBlocks(keys) * kWidth, 0.0f);
  for (int64_t j = 0; j < WholeBlocks(keys); j += 2) {
    for (int64_t n = 0; n < kWidth; n += kLanes) {
      const float* const from = s_.s + j * kWidth + n;
      const V32 pairs = RoundToPairs(hn::Load(d, from), hn::Load(d, from + kWidth));
      hn::Store(pairs, d, s_.s + j / 2 * kWidth + n);
    }
  }
  const V32 scale = hn::Set(d, 1 / kValueScale);
  static_assert(sizeof(s_.rows) >= sizeof(float) * kAmxBlock * kAmxPanelLanes);
  for (int64_t first = 0; first < dim_v_; first += kAmxBlock) {
    unit_.multiply(s_.amx_v + first * kAmxValueStride, kAmxValueStride * 4, s_.s,
                   WholeBlocks(keys) / kAmxBlock, kVectors, s_.rows);
    float* const o = s_.o + panel.lane * dim_v_padded_ + first * kWidth;
    const int64_t columns = std::min(kAmxBlock, p_.dim_v - first);
    for (int64_t i = 0; i < columns * kWidth; i += kWidth) {
      HWY_UNROLL(2)
      for (int64_t n = 0; n < kWidth; n += kLanes) {
        const V32 before = hn::Mul(hn::Load(d, o + i + n), hn::Load(d, s_.weight + panel.lane + n));
        hn::Store(hn::MulAdd(hn::Load(d, s_.rows + i + n), scale, before), d, o + i + n);
      }
    }
  }
}

// Adds what rows saw of V to O. Infinite elements are not divided by the row's sum (careful_).
void AmxRun::AddFelt() {
  const F32 d;
  careful_ = true;
  std::fill(s_.down, s_.down + vectors_ * kLanes * dim_v_padded_, 1.0f);
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    for (int64_t lane = 0; lane < panel.width(); lane += kLanes) {
      const int64_t from = (panel.lane + lane) / kLanes * p_.dim_v * kMaskBytes;
      for (int64_t i = 0; i < p_.dim_v; ++i) {
        float* const o = s_.o + panel.lane * dim_v_padded_ + i * panel.width() + lane;
        V32 sum = hn::Load(d, o);
        for (const int sign : {0, 1}) {
          const auto felt = hn::LoadMaskBits(d, felt_[sign] + from + i * kMaskBytes);
          const float infinity = std::numeric_limits<float>::infinity();
          const V32 moved = hn::Add(sum, hn::Set(d, sign == 0 ? infinity : -infinity));
          sum = hn::IfThenElse(felt, moved, sum);
        }
        hn::Store(sum, d, o);
      }
    }
  }
}

// Sets `weight` of rows that RunTile must compute to another number than 0.
void AmxRun::FindOthers() {
  const F32 d;
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    for (int64_t lane = 0; lane < panel.width(); lane += kLanes) {
      const float* const o = s_.o + panel.lane * dim_v_padded_ + lane;
      const int64_t at = panel.lane + lane;
      const V32 sum = hn::Load(d, s_.sum + at), row = hn::Load(d, s_.unpaired + at);
      V32 zero = hn::Mul(sum, hn::Zero(d));
      for (int64_t i = 0; i < p_.dim_v; ++i) {
        zero = hn::MulAdd(hn::Load(d, o + i * panel.width()), hn::Zero(d), zero);
      }
      const auto settled = hn::And(hn::Eq(row, hn::Set(d, kSettled)), hn::IsNaN(sum));
      zero = hn::IfThenElse(hn::Eq(row, hn::Set(d, kOther)), row, zero);
      hn::Store(hn::IfThenZeroElse(settled, zero), d, s_.weight + at);
    }
  }
}

void AmxRun::RunOthers() {
  bool others[kAmxRowTile];
  for (int64_t lane = 0; lane < lanes_; ++lane) others[lane] = s_.weight[lane] != 0;
  for (int64_t lane = 0, end; lane < lanes_; lane = end) {
    end = lane + 1;
    const int64_t most = std::min(lanes_, lane + kRowTile);
    while (end < most && others[end] == others[lane] && HeadOf(end) == HeadOf(lane)) ++end;
    if (!others[lane]) continue;
    Tile rows = tile_;
    rows.head = HeadOf(lane);
    rows.heads = 1;
    rows.row = RowOf(lane);
    rows.rows = end - lane;
    RunTile(rows, &s_);
  }
}

void RunAmxTile(const Tile& tile, Scratch* scratch) { AmxRun(tile, scratch).Run(); }
TileFunction AmxTileFunction() { return RunAmxTile; }

#else

TileFunction AmxTileFunction() { return nullptr; }

#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
