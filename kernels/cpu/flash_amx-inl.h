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
// Rows that tiles cannot compute are computed by RunTile, as cpu_flash does, after the others:
// those that fail FitsPairs, those that see a V that is not finite or at least 2^95, and those that
// come out not finite.

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
    Store();
    RunOthers();
  }

 private:
  void PackQuery();
  void Attend();
  void LoadKeys(int64_t j, int64_t keys);
  V32 LoadValues(const uint16_t* row, int64_t i) const;
  void LoadValuePair(const uint16_t* even, const uint16_t* odd, float* pairs, bool* spoilt) const;
  template <int kVectors>
  void PanelStep(const Panel& panel, int64_t j, int64_t keys);
  void MarkSpoilt(const Panel& panel, int64_t keys);
  template <int kVectors>
  void Output(const Panel& panel, int64_t keys);
  void FindOthers();
  void RunOthers();

  const TileUnit& unit_;
  const int64_t dim_;      // padded
  const int64_t dim_v_;    // padded
  bool spoilt_[kAmxKeys];  // of the current keys: V is not finite, or large
  bool any_spoilt_ = false;
};

void AmxRun::PackQuery() {
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    for (int64_t first = 0; first < panel.width(); first += kTurned) {
      for (int64_t r = 0; r < kTurned; ++r) {
        const int64_t lane = panel.lane + first + r;
        std::fill(s_.rows, s_.rows + dim_, 0.0f);
        if (Real(lane)) WidenRow(a_.q.data, p_.dtype, QueryOf(lane), p_.dim, s_.rows);
        s_.unpaired[lane] = FitsPairs(s_.rows, dim_) ? 0.0f : 1.0f;
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
  any_spoilt_ = false;
  for (int64_t n = 0; n < WholeBlocks(keys); n += 2 * kTurned) {
    for (int64_t r = 0; r < kTurned; ++r) {
      const int64_t key = n + 2 * r;
      LoadValuePair(row(a_.v, key), row(a_.v, key + 1), s_.rows + r * kHeadDimMax, spoilt_ + key);
      any_spoilt_ = any_spoilt_ || spoilt_[key] || spoilt_[key + 1];
    }
    TurnIn(s_.rows, kHeadDimMax, dim_v_, kAmxValueStride, s_.amx_v + n / 2);
  }
}

// Columns [i, i + kLanes) of a row of V, times 2^32; 0 beyond the last one.
HWY_INLINE V32 AmxRun::LoadValues(const uint16_t* row, int64_t i) const {
  const F32 d;
  alignas(64) uint16_t last[kLanes] = {};
  if (i + kLanes > p_.dim_v) {
    const int64_t columns = std::max<int64_t>(0, p_.dim_v - i);
    std::memcpy(last, row + i, static_cast<size_t>(columns) * sizeof(uint16_t));
    row = last, i = 0;
  }
  return hn::Mul(LoadWide<DType::kBFloat16>(d, row, i), hn::Set(d, kValueScale));
}

// Packs two keys' rows of V, column by column. Sets `spoilt` where a row has an element that is not
// finite after scaling; it is packed as 0.
HWY_INLINE void AmxRun::LoadValuePair(const uint16_t* even, const uint16_t* odd, float* pairs,
                                      bool* spoilt) const {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  auto fine_even = hn::Eq(hn::Zero(d), hn::Zero(d)), fine_odd = fine_even;
  for (int64_t i = 0; i < dim_v_; i += kLanes) {
    const V32 x = LoadValues(even, i), y = LoadValues(odd, i);
    const auto fine_x = hn::IsFinite(x), fine_y = hn::IsFinite(y);
    const auto lower = hn::BitCast(du, hn::IfThenElseZero(fine_x, x));
    const auto upper = hn::BitCast(du, hn::IfThenElseZero(fine_y, y));
    hn::Store(hn::BitCast(d, hn::Or(hn::ShiftRight<16>(lower), upper)), d, pairs + i);
    fine_even = hn::And(fine_even, fine_x);
    fine_odd = hn::And(fine_odd, fine_y);
  }
  spoilt[0] = !hn::AllTrue(d, fine_even);
  spoilt[1] = !hn::AllTrue(d, fine_odd);
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
  if (any_spoilt_) MarkSpoilt(panel, keys);
  Softmax<kVectors, false>(panel, j, keys);
  if (p_.dropout > 0) Drop(panel, j, keys);
  Output<kVectors>(panel, keys);
}

// Marks rows that see a key whose V is spoilt, however small its weight.
void AmxRun::MarkSpoilt(const Panel& panel, int64_t keys) {
  const F32 d;
  const V32 hidden = hn::Set(d, kMinusInfinity);
  for (int64_t j = 0; j < keys; ++j) {
    if (!spoilt_[j]) continue;
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      const auto seen = hn::Ne(hn::Load(d, s_.s + j * panel.width() + n), hidden);
      float* const at = s_.unpaired + panel.lane + n;
      hn::Store(hn::IfThenElse(seen, hn::Set(d, 1.0f), hn::Load(d, at)), d, at);
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

// Sets `weight` of rows that RunTile must compute to another number than 0.
void AmxRun::FindOthers() {
  const F32 d;
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    for (int64_t lane = 0; lane < panel.width(); lane += kLanes) {
      const float* const o = s_.o + panel.lane * dim_v_padded_ + lane;
      const int64_t at = panel.lane + lane;
      V32 zero = hn::Mul(hn::Load(d, s_.sum + at), hn::Zero(d));
      for (int64_t i = 0; i < p_.dim_v; ++i) {
        zero = hn::MulAdd(hn::Load(d, o + i * panel.width()), hn::Zero(d), zero);
      }
      hn::Store(hn::Add(zero, hn::Load(d, s_.unpaired + at)), d, s_.weight + at);
    }
  }
}

void AmxRun::RunOthers() {
  FindOthers();
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
