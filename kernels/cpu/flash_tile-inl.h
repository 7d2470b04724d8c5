// SPDX-License-Identifier: Apache-2.0
//
// Computes one tile of query rows against all keys that they see: scores, online softmax, output.
// Included once per instruction set by flash_tile.cc; runs on any thread, on its own Scratch.
//
// After each key tile, max, sum and O are every row's state (softmax_state.h) over the keys so far,
// with O not yet divided by sum. Hidden keys are multiplied by weight 0 until some V is not finite,
// from when on they are skipped (kSkip). If sums of large V overflowed, a second pass scales
// weights down.

#if defined(ATTEND_CPU_FLASH_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_TILE_INL_H_
#undef ATTEND_CPU_FLASH_TILE_INL_H_
#else
#define ATTEND_CPU_FLASH_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/flash_tile_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

void TileRun::Attend() {
  std::fill(s_.max, s_.max + vectors_ * kLanes, kMinusInfinity);
  std::fill(s_.sum, s_.sum + vectors_ * kLanes, 0.0f);
  std::memset(s_.o, 0, sizeof(float) * static_cast<size_t>(vectors_ * kLanes * dim_v_padded_));
  int64_t begin = keys_.begin;
  while (begin < keys_.end && !Stopped(tile_.stop)) {
    const int64_t end = std::min(keys_.end, (begin / kKeyTile + 1) * kKeyTile);
    LoadKeys(begin, end - begin);
    skips_ ? TileStep<true>(begin, end) : TileStep<false>(begin, end);
    begin = end;
  }
}

template <bool kSkip>
void TileRun::TileStep(int64_t begin, int64_t end) {
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    if (panel.any.begin >= end || panel.any.end <= begin) continue;
    const int64_t keys = std::min(end, panel.any.end) - begin;
    WithVectors(panel.vectors,
                [&]<int kVectors>() { PanelStep<kVectors, kSkip>(panel, begin, keys); });
  }
}

template <int kVectors, bool kSkip>
HWY_NOINLINE void TileRun::PanelStep(const Panel& panel, int64_t j, int64_t keys) {
  const bool masked = j < panel.all.begin || j + keys > panel.all.end;
  if (p_.has_bias) LoadBias(panel, j, keys);
  if (masked || p_.has_alibi) LoadLanes(panel, j, keys);
  Scores<kVectors>(panel, keys);
  if (!plain_) FinishScores(panel, keys);
  if (masked) MaskScores(panel, keys);
  Softmax<kVectors, kSkip>(panel, j, keys);
  if (p_.dropout > 0) Drop(panel, j, keys);
  Output<kVectors, kSkip>(panel, keys);
}

template <int kVectors>
void TileRun::Scores(const Panel& panel, int64_t keys) {
  const float* q = s_.q + panel.lane * p_.dim;
  for (int64_t j = 0; j < keys; j += kBlockRows) {
    // Past the last key, repeats it; the result is ignored.
    const float* rows[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) rows[r] = k_ + std::min(j + r, keys - 1) * p_.dim;
    float* const s = s_.s + j * kVectors * kLanes;
    if (!pairs_) {
      ScoreBlock<kVectors>(rows, q, p_.dim, s);
      continue;
    }
    const uint16_t* words[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) words[r] = k_words_[std::min(j + r, keys - 1)];
    ScorePairs<kVectors>(words, s_.q_pairs + panel.lane * (p_.dim / 2), p_.dim, s);
    if (panel.unpaired) ScoreUnpaired<kVectors>(panel, rows, s);
  }
}

// Computes again the scores of the panel's rows that fail FitsPairs.
template <int kVectors>
HWY_NOINLINE void TileRun::ScoreUnpaired(const Panel& panel, const float* const* rows, float* s) {
  const F32 d;
  HWY_ALIGN float again[kBlockRows * kVectors * kLanes];
  ScoreBlock<kVectors>(rows, s_.q + panel.lane * p_.dim, p_.dim, again);
  for (int64_t n = 0; n < kBlockRows * kVectors; ++n) {
    const V32 unpaired = hn::Load(d, s_.unpaired + panel.lane + n % kVectors * kLanes);
    const auto mask = hn::Ne(unpaired, hn::Zero(d));
    float* const at = s + n * kLanes;
    hn::Store(hn::IfThenElse(mask, hn::Load(d, again + n * kLanes), hn::Load(d, at)), d, at);
  }
}

// Applies all steps of problem.h between q.k and the mask.
void TileRun::FinishScores(const Panel& panel, int64_t keys) {
  const F32 d;
  const V32 scale = hn::Set(d, p_.scale);
  const LaneCap cap(p_);
  for (int64_t j = 0; j < keys; ++j) {
    const V32 key = hn::Set(d, static_cast<float>(j));
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      const int64_t at = j * panel.width() + n;
      V32 x = hn::Mul(hn::Load(d, s_.s + at), scale);
      if (cap.on()) x = cap.OfTanh(cap.Tanh(x));
      if (p_.has_bias && !bits_) x = hn::Add(x, hn::Load(d, s_.bias + at));
      if (p_.has_alibi) {
        const V32 distance = hn::Abs(hn::Sub(key, hn::Load(d, s_.diagonal + panel.lane + n)));
        x = hn::NegMulAdd(hn::Load(d, s_.slope + panel.lane + n), distance, x);
      }
      hn::Store(bits_ ? WithoutRemoved(x, s_.bias + at) : x, d, s_.s + at);
    }
  }
}

void TileRun::MaskScores(const Panel& panel, int64_t keys) {
  const F32 d;
  const V32 hidden = hn::Set(d, kMinusInfinity);
  for (int64_t n = 0; n < panel.width(); n += kLanes) {
    const V32 begin = hn::Load(d, s_.begin + panel.lane + n);
    const V32 end = hn::Load(d, s_.end + panel.lane + n);
    for (int64_t j = 0; j < keys; ++j) {
      const V32 key = hn::Set(d, static_cast<float>(j));
      const auto visible = hn::And(hn::Ge(key, begin), hn::Lt(key, end));
      float* at = s_.s + j * panel.width() + n;
      hn::Store(hn::IfThenElse(visible, hn::Load(d, at), hidden), d, at);
    }
  }
}

// Turns scores into weights exp(s - max) and updates the softmax state; s_.weight becomes the
// factor for the output so far. Scores are subtracted before they are scaled up, so that finite
// scores have finite weights. With kSkip, hidden keys get weight -0.
template <int kVectors, bool kSkip>
void TileRun::Softmax(const Panel& panel, int64_t j, int64_t keys) {
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 d;
  float* HWY_RESTRICT s = s_.s;
  V32 max[kVectors], base[kVectors], sum[kVectors];
  HWY_UNROLL(4)
  for (int n = 0; n < kVectors; ++n) max[n] = hn::Load(d, s_.max + panel.lane + n * kLanes);
  for (int64_t i = 0; i < keys; ++i) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      max[n] = hn::Max(max[n], hn::Load(d, s + i * kWidth + n * kLanes));
    }
  }
  HWY_UNROLL(4)
  for (int n = 0; n < kVectors; ++n) {
    const int64_t lane = panel.lane + n * kLanes;
    // If no key was seen yet, subtract 0: -inf - -inf is NaN.
    base[n] = hn::IfThenZeroElse(hn::Eq(max[n], hn::Set(d, kMinusInfinity)), max[n]);
    const V32 weight = Exp2(hn::Sub(hn::Load(d, s_.max + lane), base[n]), to_log2_);
    sum[n] = hn::Zero(d);
    hn::Store(weight, d, s_.weight + lane);
    hn::Store(max[n], d, s_.max + lane);
  }
  // Partial sums end at fixed key numbers, wherever the tile begins.
  for (int64_t first = 0, end; first < keys; first = end) {
    end = std::min(first + kSummedKeys - (j + first) % kSummedKeys, keys);
    Weigh<kVectors, kSkip>(base, to_log2_, end - first, s + first * kWidth, sum);
  }
  HWY_UNROLL(4)
  for (int n = 0; n < kVectors; ++n) {
    const int64_t lane = panel.lane + n * kLanes;
    const V32 before = hn::Mul(hn::Load(d, s_.sum + lane), hn::Load(d, s_.weight + lane));
    hn::Store(hn::Add(before, sum[n]), d, s_.sum + lane);
  }
}

void TileRun::Drop(const Panel& panel, int64_t j, int64_t keys) {
  // Count rows as if the tile began with a whole block of 16.
  const int64_t shift = (a_.dropout.row + tile_.row) % kDropoutTile;
  const int64_t first = panel.lane + shift;
  const int64_t offset = first % kDropoutTile;
  RowBlock blocks[kDrawStride / kDropoutTile];
  for (int64_t row = 0; row < offset + panel.width(); row += kDropoutTile) {
    const int64_t lane = std::max<int64_t>(0, first - offset + row - shift);
    const int64_t begin = a_.dropout.row + RowOf(lane);
    blocks[row / kDropoutTile] = {begin - begin % kDropoutTile, a_.dropout.head + HeadOf(lane)};
  }
  DropWeights(a_, tile_.b, blocks, offset, panel.width(), p_.key_offset + j, keys, s_.draws, s_.s);
}

template <int kVectors, bool kSkip>
void TileRun::Output(const Panel& panel, int64_t keys) {
  const int64_t begin = panel.lane * dim_v_padded_;
  for (int64_t i = 0; i < p_.dim_v; i += kBlockRows) {
    const float* v = s_.v + i / kValueBlock * block_stride_ + i % kValueBlock;
    const int64_t at = begin + i * kVectors * kLanes;
    OutputBlock<kVectors, kSkip>(v, s_.s, keys, s_.weight + panel.lane,
                                 scaled_ ? s_.down + at : nullptr, s_.o + at);
  }
}

bool TileRun::OutputFinite() const {
  constexpr int64_t kChains = 4;  // independent sums, for latency
  static_assert(kValueBlock % kChains == 0);
  const F32 d;
  V32 zero[kChains];
  HWY_UNROLL(4)
  for (int n = 0; n < kChains; ++n) zero[n] = hn::Zero(d);
  for (int64_t i = 0; i < vectors_ * kLanes * dim_v_padded_; i += kChains * kLanes) {
    HWY_UNROLL(4)
    for (int n = 0; n < kChains; ++n) {
      zero[n] = hn::MulAdd(hn::Load(d, s_.o + i + n * kLanes), hn::Zero(d), zero[n]);
    }
  }
  const V32 all = hn::Add(hn::Add(zero[0], zero[1]), hn::Add(zero[2], zero[3]));
  return hn::AllTrue(d, hn::Eq(all, hn::Zero(d)));
}

// Whether sums of V may overflow, with each weight at most 1 when it is added.
bool TileRun::HasHugeValues() const {
  const auto keys = static_cast<uint64_t>(keys_.end - keys_.begin);
  const F32 d;
  const V32 most = hn::Set(d, std::ldexp(std::numeric_limits<float>::max(), -std::bit_width(keys)));
  std::fill(s_.rows, s_.rows + kHeadDimMax, 0.0f);
  for (int64_t j = keys_.begin; j < keys_.end; ++j) {
    const int64_t v = KeyElement(a_, a_.v, sequence_, tile_.b, tile_.head / p_.group(), j);
    WidenRow(a_.v.data, p_.dtype, v, p_.dim_v, s_.rows);
    for (int64_t i = 0; i < p_.dim_v; i += kLanes) {
      const V32 x = hn::Load(d, s_.rows + i);
      const auto huge = hn::And(hn::IsFinite(x), hn::Gt(hn::Abs(x), most));
      if (!hn::AllFalse(d, huge)) return true;
    }
  }
  return false;
}

// Sets the factors for weights, 1 unless there is another pass. There, for elements of O that are
// not finite, all weights of the row sum to less than 1, so the element stays within V's range.
// Elements that are finite keep their bits.
void TileRun::ScaleDown(bool scaled) {
  scaled_ = skips_ = scaled;
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    const int64_t begin = panel.lane * dim_v_padded_;
    for (int64_t r = 0; r < panel.width(); ++r) {
      const KeyRange range = KeysOf(panel.lane + r);
      const auto keys = static_cast<uint64_t>(std::max<int64_t>(0, range.end - range.begin));
      const float down = std::ldexp(1.0f, -std::bit_width(keys));
      for (int64_t d = 0; d < dim_v_padded_; ++d) {
        const int64_t at = begin + d * panel.width() + r;
        s_.down[at] = std::isfinite(s_.o[at]) || !scaled ? 1.0f : down;
      }
    }
  }
}

void TileRun::Store() {
  for (int64_t n = 0; n < panel_count_; ++n) {
    const Panel& panel = panels_[n];
    const float* o = s_.o + panel.lane * dim_v_padded_;
    for (int64_t first = 0; first < panel.width(); first += kTurned) {
      TurnOut(o + first, panel.width(), p_.dim_v, kHeadDimMax, s_.rows);
      for (int64_t r = 0; r < kTurned; ++r) {
        const int64_t lane = panel.lane + first + r;
        const float* down = s_.down + panel.lane * dim_v_padded_ + first + r;
        if (lane < lanes_) StoreRow(lane, down, panel.width(), s_.rows + r * kHeadDimMax);
      }
    }
  }
}

void TileRun::StoreRow(int64_t lane, const float* down, int64_t stride, float* o) {
  const int64_t h = HeadOf(lane);
  const int64_t row = sequence_.q_row + RowOf(lane);
  const double sum = static_cast<double>(s_.sum[lane]);
  SoftmaxState<double> state{static_cast<double>(s_.max[lane]) * unit_, sum};
  double factor = 1;
  if (p_.has_sinks && Real(lane)) factor = AddSink(state, static_cast<double>(a_.sinks[h]));
  factor = sum == 0 ? 0 : factor * InverseSum(state);
  if (careful_) ScaleUp(down, stride, factor, o);
  NarrowRow(o, careful_ ? 1.0f : static_cast<float>(factor * kept_), p_.dim_v, p_.o_dtype(),
            a_.o.data, tile_.b * a_.o.stride_b + h * a_.o.stride_h + row * a_.o.stride_l);
  if (p_.return_lse) {
    a_.lse[tile_.b * a_.lse_stride_b + h * a_.lse_stride_h + row] =
        static_cast<float>(LogSumExp(state));
  }
}

// Multiplies a row by `factor` and dropout's factor, and undoes ScaleDown. A mean lies within the
// range of its values, but its rounding may leave it (hence the clamp), and so may dropout's
// factor.
void TileRun::ScaleUp(const float* down, int64_t stride, double factor, float* o) const {
  constexpr float kMost = std::numeric_limits<float>::max();
  const auto mean = static_cast<float>(factor);
  const auto kept = static_cast<float>(kept_);
  const auto both = static_cast<float>(factor * kept_);
  for (int64_t d = 0; d < p_.dim_v; ++d) {
    if (!std::isfinite(o[d]) && factor > 0) continue;  // even if `factor` underflows in fp32
    const float by = down[d * stride];
    const bool clamped = by != 1 && std::isfinite(o[d]);
    o[d] = clamped ? std::clamp(o[d] * (mean / by), -kMost, kMost) * kept : o[d] * both;
  }
}

void RunTile(const Tile& tile, Scratch* scratch) { TileRun(tile, scratch).Run(); }

int64_t RunningTarget() { return HWY_TARGET; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
