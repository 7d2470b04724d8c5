// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of a range of keys against a band of query rows. Included once per instruction
// set by flash_gradients_tile.cc; continues flash_gradients_run-inl.h.
//
// The outer loop takes key tiles, whose keys lie across lanes; the inner one takes the tiles of
// rows that see any of them. Each step recomputes P from S and LSE, then adds to dV, dK and dQ.
// Hidden keys have P = dS = 0 by selection. If an input is NaN or Inf (careful_), their weights are
// -0, and the products skip them.

#if defined(ATTEND_CPU_FLASH_GRADIENTS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_GRADIENTS_TILE_INL_H_
#undef ATTEND_CPU_FLASH_GRADIENTS_TILE_INL_H_
#else
#define ATTEND_CPU_FLASH_GRADIENTS_TILE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/flash_gradients_run-inl.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

constexpr float kLog2e = 1.44269504088896341f;

// Adds `count` lanes to memory of any alignment. Returns the sums.
HWY_INLINE V32 AddTo(float* to, V32 x, int64_t count) {
  const F32 d;
  if (count >= kLanes) {
    const V32 sum = hn::Add(hn::LoadU(d, to), x);
    hn::StoreU(sum, d, to);
    return sum;
  }
  HWY_ALIGN float lanes[kLanes] = {};
  std::copy(to, to + count, lanes);
  const V32 sum = hn::Add(hn::Load(d, lanes), x);
  hn::Store(sum, d, lanes);
  std::copy(lanes, lanes + count, to);
  return sum;
}

// Processes one tile of rows against the key tile.
void GradientRun::TileStep(int64_t first, int64_t count, const RowsKeys& seen) {
  careful_ = LoadRows(first, count) || special_keys_;
  sums_begun_ = false;
  KeyRange lanes{keys_, 0};  // of the panels seen, which are neighbours
  for (int64_t n = 0; n < CountPanels(keys_, task_.amx); ++n) {
    const LanePanel panel = PanelOf(keys_, n, task_.amx);
    const int64_t begin = tile_ + panel.lane;
    const int64_t end = tile_ + std::min(keys_, panel.lane + panel.width());
    if (seen.any.begin >= end || seen.any.end <= begin) continue;
    // Lanes without a key must be hidden too.
    const bool masked = seen.all.begin > begin || seen.all.end < tile_ + panel.lane + panel.width();
    WithVectors(panel.vectors, [&]<int kVectors>() { PanelStep<kVectors>(panel, count, masked); });
    lanes = {std::min(lanes.begin, panel.lane), end - tile_};
  }
  if (sums_begun_) StoreSums(count);
  if (task_.d_q == nullptr || lanes.begin >= lanes.end) return;
  for (int64_t n = 0; n < CountPanels(p_.dim); ++n) {
    const LanePanel panel = PanelOf(p_.dim, n);
    WithVectors(panel.vectors,
                [&]<int kVectors>() { AddQueries<kVectors>(panel.lane, first, count, lanes); });
  }
}

template <int kVectors>
HWY_NOINLINE void GradientRun::PanelStep(const LanePanel& panel, int64_t count, bool masked) {
  Products<kVectors>(s_.q, s_.k + panel.lane * p_.dim, p_.dim, count, s_.weight);
  if (!plain_) FinishScores(panel, count);
  if (task_.step == GradientStep::kCorrect) {
    WeighErrors<kVectors>(panel, count, masked);
  } else {
    Products<kVectors>(s_.d_o, s_.v + panel.lane * p_.dim_v, p_.dim_v, count, s_.d_weight);
    if (p_.dropout > 0) {
      Draw(panel, count);
      WeighOrMeasure<kVectors, true>(panel, count, masked);
    } else {
      WeighOrMeasure<kVectors, false>(panel, count, masked);
    }
    if (task_.step == GradientStep::kMeasure) return;
  }
  if (task_.d_bias) AddBias(panel, count);
  if (CapOf(p_).on()) Slope(panel, count);
  const int64_t at = tile_ - task_.keys.begin + panel.lane;
  if (task_.d_v != nullptr) {
    AddKeys<kVectors>(s_.d_o, s_.weight, panel.width(), p_.dim_v, count,
                      task_.d_v + at * PaddedDim(p_.dim_v));
  }
  if (task_.d_k != nullptr) {
    AddKeys<kVectors>(s_.q, s_.d_score + panel.lane, kGradientKeys, p_.dim, count,
                      task_.d_k + at * PaddedDim(p_.dim));
  }
}

// out[row][lane] = sum over d of rows[row][d] * panel[d][lane]: S, or dP.
template <int kVectors>
void GradientRun::Products(const float* rows, const float* panel, int64_t dim, int64_t count,
                           float* out) {
  for (int64_t n = 0; n < count; n += kBlockRows) {
    // Past the last row, repeats it; the result is ignored.
    const float* block[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) block[r] = rows + std::min(n + r, count - 1) * kRowStride;
    ScoreBlock<kVectors>(block, panel, dim, out + n * kPanelLanes<kVectors>);
  }
}

// Row t's scores from `lane` of the key tile on, -inf for hidden keys.
HWY_INLINE V32 GradientRun::ScoreOf(const LanePanel& panel, int64_t t, int64_t lane,
                                    bool masked) const {
  const F32 d;
  const V32 score = hn::Load(d, s_.weight + t * panel.width() + lane - panel.lane);
  if (!masked) return score;
  const V32 key = hn::Iota(d, static_cast<float>(lane));
  const auto seen =
      hn::And(hn::Ge(key, hn::Set(d, s_.begin[t])), hn::Lt(key, hn::Set(d, s_.end[t])));
  return hn::IfThenElse(seen, score, hn::Set(d, -std::numeric_limits<float>::infinity()));
}

// Their exponents: -inf where the score is, else at most 0, since no weight is above 1, however LSE
// was rounded. But for Rows::kAny, shift is 0, and -inf is NaN if base is.
template <Rows kRows>
HWY_INLINE V32 GradientRun::ExponentOf(const LanePanel& panel, int64_t t, int64_t lane,
                                       bool masked) const {
  const F32 d;
  const RowTerms& terms = *s_.terms[t];
  const V32 score = ScoreOf(panel, t, lane, masked);
  constexpr bool kAny = kRows == Rows::kAny;
  const V32 moved = kAny ? hn::Sub(score, hn::Set(d, terms.shift)) : score;
  V32 x = hn::MulSub(moved, hn::Set(d, unit_), hn::Set(d, terms.base));
  const V32 none = hn::Set(d, -std::numeric_limits<float>::infinity());
  if (kAny) x = hn::IfThenElse(hn::Eq(score, none), none, x);
  return AtMost(hn::Zero(d), x);
}

// Which weights dropout removes, of those whose draws begin at `draws`.
HWY_INLINE auto DroppedLanes(const uint16_t* draws, int32_t dropout) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const hn::Rebind<uint16_t, F32> d16;
  return hn::RebindMask(d, hn::Lt(hn::PromoteTo(di, hn::LoadU(d16, draws)), hn::Set(di, dropout)));
}

// Raises the shift of a row that is being measured and rescales its sums. An Inf among them stays.
void GradientRun::RaiseShift(int64_t t, float shift) {
  RowTerms& terms = task_.measured[TermsIndex(p_, sequence_, IdOf(s_.row[t]))];
  const float factor = std::exp((terms.shift - shift) * unit_);
  terms.shift = s_.own_terms[t].shift = shift;
  const auto scale = [&](float* sum) { *sum *= std::isinf(*sum) ? 1.0f : factor; };
  scale(&terms.base);
  scale(&terms.less);
  float* const sums = s_.sums + t * kRowSums * kLanes;
  for (int64_t n = 0; n < 2 * kLanes && sums_begun_; ++n) scale(sums + n);
}

HWY_INLINE void GradientRun::AddSums(int64_t t, V32 d_scores, V32 squares, V32 norms) {
  const F32 d;
  float* const at = s_.sums + t * kRowSums * kLanes;
  if (sums_begun_) {
    d_scores = hn::Add(d_scores, hn::Load(d, at));
    squares = hn::Add(squares, hn::Load(d, at + kLanes));
    norms = hn::Add(norms, hn::Load(d, at + 2 * kLanes));
  }
  hn::Store(d_scores, d, at);
  hn::Store(squares, d, at + kLanes);
  hn::Store(norms, d, at + 2 * kLanes);
}

// Adds up P, and P dP, of rows that are being measured, with the largest score so far as shift, and
// base 0.
template <int kVectors, bool kDropout>
void GradientRun::Measure(const LanePanel& panel, int64_t count, bool masked) {
  const F32 d;
  const V32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  const V32 kept = hn::Set(d, DropoutScale(p_.dropout));
  const int64_t offset = (p_.key_offset + tile_ + panel.lane) % kDropoutTile;
  for (int64_t t = 0; t < count; ++t) {
    V32 most = hidden;
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      most = hn::Max(most, ScoreOf(panel, t, panel.lane + n * kLanes, masked));
    }
    if (!hn::AllFalse(d, hn::Gt(most, hn::Set(d, s_.terms[t]->shift)))) {
      RaiseShift(t, hn::GetLane(hn::MaxOfLanes(d, most)));
    }
    V32 sum = hn::Zero(d), delta = hn::Zero(d);
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      const V32 x = ExponentOf<Rows::kAny>(panel, t, panel.lane + n * kLanes, masked);
      const V32 p = Exp2(x, kLog2e);
      V32 d_weight = hn::Load(d, s_.d_weight + (t * kVectors + n) * kLanes);
      if constexpr (kDropout) {
        const auto dropped =
            DroppedLanes(s_.draws + t * kDrawStride + offset + n * kLanes, p_.dropout);
        d_weight = hn::IfThenZeroElse(dropped, hn::Mul(d_weight, kept));
      }
      const V32 by = hn::IfThenElse(hn::IsFinite(d_weight), p, NotZero(p));
      sum = hn::Add(sum, p);
      delta = hn::Add(delta, hn::IfThenZeroElse(hn::Eq(x, hidden), hn::Mul(by, d_weight)));
    }
    AddSums(t, sum, delta, hn::Zero(d));
  }
  sums_begun_ = true;
}

// Turns sums over all keys into terms.
void GradientRun::FinishMeasuring() {
  for (int64_t n = 0; n < row_count_; ++n) {
    const RowId id = IdOf(task_.RowAt(n));
    RowTerms& terms = task_.measured[TermsIndex(p_, sequence_, id)];
    const auto shift = static_cast<double>(terms.shift) * static_cast<double>(unit_);
    SoftmaxState<double> softmax{shift, static_cast<double>(terms.base)};
    double factor = 1, sink = 0;
    if (p_.has_sinks) {
      factor = AddSink(softmax, static_cast<double>(a_.sinks[id.h]));
      sink = ScaledExp(static_cast<double>(a_.sinks[id.h]), softmax.max) * InverseSum(softmax);
    }
    const double delta = static_cast<double>(terms.less) * factor * InverseSum(softmax);
    terms.less = static_cast<float>(delta) - DLseOf(a_, g_, sequence_, id);
    terms.base = static_cast<float>(std::log(softmax.sum) + (softmax.max - shift));
    terms.sink = static_cast<float>(sink);
  }
}

template <int kVectors, bool kDropout>
void GradientRun::WeighOrMeasure(const LanePanel& panel, int64_t count, bool masked) {
  if (task_.step == GradientStep::kMeasure) {
    Measure<kVectors, kDropout>(panel, count, masked);
  } else if (in_tiles_ && careful_) {
    Weigh<kVectors, kDropout, Rows::kSpecialInTiles>(panel, count, masked);
  } else if (careful_ || (task_.measured != nullptr && !in_tiles_)) {
    Weigh<kVectors, kDropout, Rows::kAny>(panel, count, masked);
  } else {
    Weigh<kVectors, kDropout, Rows::kOrdinary>(panel, count, masked);
  }
}

// P = exp(score - LSE) and dS = P (dP - less), both 0 for hidden keys, whatever dP is. With
// dropout, dP includes its factor, and dropped weights are 0 for dV; dV's factor is applied when it
// is stored.
template <int kVectors, bool kDropout, Rows kRows>
void GradientRun::Weigh(const LanePanel& panel, int64_t count, bool masked) {
  const F32 d;
  const V32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  constexpr bool kSpecial = kRows != Rows::kOrdinary, kAny = kRows == Rows::kAny;
  const V32 none = hn::Set(d, kAny && careful_ ? -0.0f : 0.0f);
  const V32 kept = hn::Set(d, DropoutScale(p_.dropout) * d_weight_unit_);
  const int64_t offset = (p_.key_offset + tile_ + panel.lane) % kDropoutTile;
  for (int64_t t = 0; t < count; ++t) {
    const V32 less = hn::Set(d, s_.terms[t]->less);
    V32 sum = hn::Zero(d), square = hn::Zero(d), norm = hn::Zero(d);
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      const int64_t lane = panel.lane + n * kLanes;
      const int64_t at = t * kPanelLanes<kVectors> + n * kLanes;
      const V32 x = ExponentOf<kRows>(panel, t, lane, masked);
      const auto unseen =
          hn::Eq(kRows == Rows::kSpecialInTiles ? ScoreOf(panel, t, lane, masked) : x, hidden);
      const V32 p = Exp2(x, kLog2e);
      const V32 d_weight = hn::Load(d, s_.d_weight + at);
      V32 moved = hn::MulSub(d_weight, kept, less);
      V32 factor_of_v = kSpecial ? hn::IfThenElse(unseen, none, p) : p;
      if constexpr (kDropout) {
        const auto dropped =
            DroppedLanes(s_.draws + t * kDrawStride + offset + n * kLanes, p_.dropout);
        moved = hn::IfThenElse(dropped, hn::Neg(less), moved);
        factor_of_v = hn::IfThenElse(dropped, none, factor_of_v);
      }
      // However small its weight, a visible key passes on an Inf.
      const V32 by = kSpecial ? hn::IfThenElse(hn::IsFinite(moved), p, NotZero(p)) : p;
      V32 d_score = hn::Mul(by, moved);
      // Makes -0 to +0. Adding 0 would not: it may be fused with the product, and give -0 again.
      if (kAny) d_score = hn::IfThenZeroElse(hn::Eq(d_score, hn::Zero(d)), d_score);
      d_score = hn::IfThenElse(unseen, none, d_score);
      hn::Store(factor_of_v, d, s_.weight + at);
      hn::Store(d_score, d, s_.d_score + t * kGradientKeys + lane);
      sum = hn::Add(sum, d_score);
      square = hn::MulAdd(d_score, d_score, square);
      norm = hn::MulAdd(p, hn::Load(d, s_.norms + lane), norm);
    }
    if (task_.sums) AddSums(t, sum, square, norm);
  }
  sums_begun_ = task_.sums;
}

// Replaces dS by its correction: -P times delta's error.
template <int kVectors>
void GradientRun::WeighErrors(const LanePanel& panel, int64_t count, bool masked) {
  const F32 d;
  const V32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  const V32 none = hn::Set(d, careful_ ? -0.0f : 0.0f);
  for (int64_t t = 0; t < count; ++t) {
    const V32 error = hn::Set(d, -task_.errors[s_.row[t]].error);
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      const int64_t lane = panel.lane + n * kLanes;
      const V32 x = ExponentOf<Rows::kAny>(panel, t, lane, masked);
      const V32 d_score = hn::Mul(Exp2(x, kLog2e), error);
      hn::Store(hn::IfThenElse(hn::Eq(x, hidden), none, d_score), d,
                s_.d_score + t * kGradientKeys + lane);
    }
  }
}

// Reduces the key tile's lane sums into the rows' sums.
void GradientRun::StoreSums(int64_t count) {
  const F32 d;
  const auto total = [&](const float* at) {
    return hn::GetLane(hn::SumOfLanes(d, hn::Load(d, at)));
  };
  for (int64_t t = 0; t < count; ++t) {
    const float* const at = s_.sums + t * kRowSums * kLanes;
    if (task_.step == GradientStep::kMeasure) {
      RowTerms& terms = task_.measured[TermsIndex(p_, sequence_, IdOf(s_.row[t]))];
      terms.base += total(at);
      terms.less += total(at + kLanes);
      continue;
    }
    RowSums& sums = task_.states[s_.row[t]].sums;
    sums.d_scores += total(at);
    sums.squares += total(at + kLanes);
    sums.norms += total(at + 2 * kLanes);
  }
}

// Rows that share their place in dBias are summed first.
void GradientRun::AddBias(const LanePanel& panel, int64_t count) {
  const F32 d;
  for (int64_t lane = panel.lane; lane < std::min(keys_, panel.lane + panel.width());
       lane += kLanes) {
    const int64_t lanes = std::min(kLanes, keys_ - lane);
    V32 sum = hn::Zero(d);
    for (int64_t t = 0; t < count; ++t) {
      sum = hn::Add(sum, hn::Load(d, s_.d_score + t * kGradientKeys + lane));
      if (t + 1 < count && s_.d_bias[t + 1] == s_.d_bias[t]) continue;
      special_ = hn::MulAdd(AddTo(s_.d_bias[t] + lane, sum, lanes), hn::Zero(d), special_);
      sum = hn::Zero(d);
    }
  }
}

// Turns dS by the score into dS by scale * q.k.
void GradientRun::Slope(const LanePanel& panel, int64_t count) {
  const F32 d;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      float* const at = s_.d_score + t * kGradientKeys + panel.lane + n;
      const V32 slope = hn::Load(d, s_.slope + t * panel.width() + n);
      const V32 d_score = hn::Load(d, at);
      V32 by_slope = hn::Mul(d_score, slope);
      if (careful_) {  // a visible key's product may be -0 too
        const V32 seen = hn::IfThenZeroElse(hn::Eq(by_slope, hn::Zero(d)), by_slope);
        by_slope = hn::IfThenElse(IsHiddenWeight(d_score), d_score, seen);
      }
      hn::Store(by_slope, d, at);
    }
  }
}

// sums[d][lane] += sum over rows of rows[row][d] * by[row][lane]: dV, or dK.
template <int kVectors>
void GradientRun::AddKeys(const float* rows, const float* by, int64_t by_stride, int64_t dim,
                          int64_t count, float* sums) {
  for (int64_t d = 0; d < dim; d += kBlockRows) {
    float* const to = sums + d * kPanelLanes<kVectors>;
    if (careful_) {
      OutputBlock<kVectors, true>(rows + d, by, count, s_.ones, nullptr, to, kRowStride, by_stride,
                                  by == s_.weight);
    } else {
      OutputBlock<kVectors, false>(rows + d, by, count, s_.ones, nullptr, to, kRowStride,
                                   by_stride);
    }
  }
}

// Columns [dim, dim + width) of dQ: each row's dS, over the lanes, times K's rows.
template <int kVectors>
HWY_NOINLINE void GradientRun::AddQueries(int64_t dim, int64_t first, int64_t count,
                                          const KeyRange& lanes) {
  const F32 d;
  const int64_t stride = PaddedDim(p_.dim);
  for (int64_t n = 0; n < count; n += kBlockRows) {
    const float* block[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) {
      block[r] = s_.d_score + std::min(n + r, count - 1) * kGradientKeys + lanes.begin;
    }
    const float* const keys = s_.k_rows + lanes.begin * kRowStride + dim;
    const int64_t key_count = lanes.end - lanes.begin;
    if (listed_ == nullptr) {
      float* const to = task_.d_q + (first + n) * stride + dim;
      careful_ ? ScoreBlock<kVectors, true, true>(block, keys, key_count, to, kRowStride, stride)
               : ScoreBlock<kVectors, true>(block, keys, key_count, to, kRowStride, stride);
      continue;
    }
    // Rows that are listed lie apart.
    constexpr int64_t kWidth = kPanelLanes<kVectors>;
    careful_ ? ScoreBlock<kVectors, false, true>(block, keys, key_count, s_.weight, kRowStride)
             : ScoreBlock<kVectors>(block, keys, key_count, s_.weight, kRowStride);
    for (int64_t r = 0; r < std::min<int64_t>(kBlockRows, count - n); ++r) {
      float* const to = task_.d_q + s_.row[n + r] * stride + dim;
      for (int64_t i = 0; i < kWidth; i += kLanes) {
        AddTo(to + i, hn::Load(d, s_.weight + r * kWidth + i), kLanes);
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
