// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of a run of keys against a band of query rows: key tile by key tile, with keys
// across lanes, and for each the tiles of rows that see any of its keys. Included once per
// instruction set by flash_gradients_tile.cc; runs on any thread, on its own scratch.

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

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/flash_gradients_rows-inl.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Adds `count` lanes to memory of any alignment. The sums come back, to be looked at.
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

class GradientRun {
 public:
  GradientRun(const GradientTask& task, GradientScratch* scratch)
      : task_(task),
        a_(*task.attention),
        g_(*task.gradients),
        p_(task.attention->problem),
        s_(*scratch),
        sequence_(task.sequence),
        row_count_(task.heads * task.rows),
        plain_(p_.softcap == 0 && !p_.has_bias && !p_.has_alibi) {}

  void Run() {
    Begin();
    for (tile_ = task_.keys.begin; tile_ < task_.keys.end; tile_ += kGradientKeys) {
      keys_ = std::min(kGradientKeys, task_.keys.end - tile_);
      bool loaded = false;
      for (int64_t first = 0; first < row_count_; first += kGradientRows) {
        const int64_t count = std::min(kGradientRows, row_count_ - first);
        const RowsKeys seen = KeysOfRows(task_, first, count);
        if (seen.any.begin >= tile_ + keys_ || seen.any.end <= tile_) continue;
        if (Stopped(task_.stop)) return;
        if (!loaded) LoadKeys();
        loaded = true;
        TileStep(first, count, seen);
      }
    }
    const F32 d;
    if (task_.d_bias && !hn::AllTrue(d, hn::Eq(special_, hn::Zero(d)))) {
      task_.careful->store(true, std::memory_order_relaxed);
    }
  }

 private:
  int64_t HeadOf(int64_t row) const { return task_.head + row / task_.rows; }
  int64_t RowOf(int64_t row) const { return task_.row + row % task_.rows; }

  void Begin();
  void LoadKeys();
  void LoadRows(int64_t first, int64_t count);
  void LoadRow(int64_t row, int64_t at);
  void TileStep(int64_t first, int64_t count, const RowsKeys& seen);
  template <int kVectors>
  void PanelStep(const LanePanel& panel, int64_t first, int64_t count, bool masked);
  template <int kVectors>
  void Products(const float* rows, const float* panel, int64_t dim, int64_t count, float* out);
  void FinishScores(const LanePanel& panel, int64_t count);
  void Draw(const LanePanel& panel, int64_t first, int64_t count);
  template <int kVectors, bool kDropout>
  void Weigh(const LanePanel& panel, int64_t count, bool masked);
  void AddBias(const LanePanel& panel, int64_t count);
  void Slope(const LanePanel& panel, int64_t count);
  template <int kVectors>
  void AddKeys(const float* rows, const float* by, int64_t by_stride, int64_t dim, int64_t count,
               float* sums);
  template <int kVectors>
  void AddQueries(int64_t dim, int64_t first, int64_t count, const KeyRange& lanes);

  const GradientTask& task_;
  const Attention& a_;
  const Gradients& g_;
  const Problem& p_;
  GradientScratch& s_;
  const Sequence& sequence_;
  const int64_t row_count_;
  const bool plain_;  // scores are scale * q.k
  int64_t tile_ = 0;  // first key of the key tile, and how many there are
  int64_t keys_ = 0;
  V32 special_ = hn::Zero(F32());  // NaN once something added to dBias is not finite
};

void GradientRun::Begin() {
  std::fill_n(s_.ones, kPanelLanesMax, 1.0f);
  if (task_.d_q != nullptr) {
    std::fill_n(task_.d_q, PaddedRows(row_count_) * PaddedDim(p_.dim), 0.0f);
  }
  if (!task_.begins) return;
  const int64_t lanes = PaddedKeys(task_.keys.end - task_.keys.begin);
  if (task_.d_k != nullptr) std::fill_n(task_.d_k, lanes * PaddedDim(p_.dim), 0.0f);
  if (task_.d_v != nullptr) std::fill_n(task_.d_v, lanes * PaddedDim(p_.dim_v), 0.0f);
}

// K and V of the key tile. Lanes without a key are 0, and so are columns of K's rows beyond D.
void GradientRun::LoadKeys() {
  const int64_t h_kv = task_.head / p_.group();
  const int64_t lanes = CountVectors(keys_) * kLanes;
  for (int64_t j = 0; j < lanes; ++j) {
    float* const row = s_.k_rows + j * kRowStride;
    const int64_t loaded = j < keys_ ? p_.dim : 0;
    if (loaded > 0) {
      WidenRow(a_.k.data, p_.dtype, KeyElement(a_, a_.k, sequence_, task_.b, h_kv, tile_ + j),
               p_.dim, row);
    }
    std::fill(row + loaded, row + PaddedDim(p_.dim), 0.0f);
  }
  for (int64_t n = 0; n < CountPanels(keys_); ++n) {
    const LanePanel panel = PanelOf(keys_, n);
    for (int64_t lane = panel.lane; lane < panel.lane + panel.width(); lane += kTurned) {
      const int64_t at = lane - panel.lane;
      TurnIn(s_.k_rows + lane * kRowStride, kRowStride, p_.dim, panel.width(),
             s_.k + panel.lane * p_.dim + at);
      for (int64_t r = 0; r < kTurned; ++r) {
        float* const row = s_.rows + r * kRowStride;
        if (lane + r < keys_) {
          const int64_t v = KeyElement(a_, a_.v, sequence_, task_.b, h_kv, tile_ + lane + r);
          WidenRow(a_.v.data, p_.dtype, v, p_.dim_v, row);
        } else {
          std::fill(row, row + p_.dim_v, 0.0f);
        }
      }
      TurnIn(s_.rows, kRowStride, p_.dim_v, panel.width(), s_.v + panel.lane * p_.dim_v + at);
    }
  }
}

// Everything about one row of the tile of rows.
void GradientRun::LoadRow(int64_t row, int64_t at) {
  const RowId id{task_.b, HeadOf(row), RowOf(row)};
  float* const q = s_.q + at * kRowStride;
  float* const d_o = s_.d_o + at * kRowStride;
  const auto element = [&](const auto& view) {
    return RowElement(sequence_, id.b, id.h, id.i, view.stride_b, view.stride_h, view.stride_l);
  };
  WidenRow(a_.q.data, p_.dtype, element(a_.q), p_.dim, q);
  std::fill(q + p_.dim, q + PaddedDim(p_.dim), 0.0f);
  WidenRow(g_.d_o.data, p_.o_dtype(), element(g_.d_o), p_.dim_v, d_o);
  std::fill(d_o + p_.dim_v, d_o + PaddedDim(p_.dim_v), 0.0f);
  s_.less[at] = LessOf(a_, g_, sequence_, id, d_o, s_.rows);

  const KeyRange range = VisibleKeys(p_.mask, sequence_, id.i);
  s_.begin[at] = static_cast<float>(std::clamp<int64_t>(range.begin - tile_, 0, keys_));
  s_.end[at] = static_cast<float>(std::clamp<int64_t>(range.end - tile_, 0, keys_));
  // A row that sees nothing has LSE -inf, and -inf - -inf would be NaN. Where LSE is special
  // otherwise, fp32's range was left, and NaN brings the KV head to the reference.
  const float lse =
      a_.lse[RowElement(sequence_, id.b, id.h, id.i, a_.lse_stride_b, a_.lse_stride_h, 1)];
  const bool none = lse < 0 && (range.begin >= range.end || p_.has_bias);
  s_.base[at] = std::isfinite(lse) ? lse : none ? 0 : std::numeric_limits<float>::quiet_NaN();

  if (p_.has_alibi) {
    s_.diagonal[at] = static_cast<float>(id.i + sequence_.offset - tile_);
    s_.alibi[at] = a_.alibi_slopes[id.b * a_.alibi_stride_b + id.h];
  }
  if (p_.has_bias) {
    float* const bias = s_.bias + at * kGradientKeys;
    const int64_t index =
        id.b * a_.bias.stride_b + id.h * a_.bias.stride_h + id.i * a_.bias.stride_q + tile_;
    WidenRow(a_.bias.data, a_.bias.dtype, index, keys_, bias);
    std::fill(bias + keys_, bias + CountVectors(keys_) * kLanes, 0.0f);
  }
  if (task_.d_bias) {
    s_.d_bias[at] = static_cast<float*>(g_.d_bias.data) + id.b * g_.d_bias.stride_b +
                    id.h * g_.d_bias.stride_h + id.i * g_.d_bias.stride_l + tile_;
  }
}

// One tile of rows against the key tile.
void GradientRun::TileStep(int64_t first, int64_t count, const RowsKeys& seen) {
  for (int64_t n = 0; n < count; ++n) LoadRow(first + n, n);
  KeyRange lanes{keys_, 0};  // of the panels that are seen, which are neighbours
  for (int64_t n = 0; n < CountPanels(keys_); ++n) {
    const LanePanel panel = PanelOf(keys_, n);
    const int64_t begin = tile_ + panel.lane;
    const int64_t end = tile_ + std::min(keys_, panel.lane + panel.width());
    if (seen.any.begin >= end || seen.any.end <= begin) continue;
    const bool masked = seen.all.begin > begin || seen.all.end < end;
    switch (panel.vectors) {
      case 1:
        PanelStep<1>(panel, first, count, masked);
        break;
      case 2:
        PanelStep<2>(panel, first, count, masked);
        break;
      case 3:
        if constexpr (kPanelVectors > 2) PanelStep<3>(panel, first, count, masked);
        break;
    }
    lanes = {std::min(lanes.begin, panel.lane), end - tile_};
  }
  if (task_.d_q == nullptr || lanes.begin >= lanes.end) return;
  for (int64_t n = 0; n < CountPanels(p_.dim); ++n) {
    const LanePanel panel = PanelOf(p_.dim, n);
    switch (panel.vectors) {
      case 1:
        AddQueries<1>(panel.lane, first, count, lanes);
        break;
      case 2:
        AddQueries<2>(panel.lane, first, count, lanes);
        break;
      case 3:
        if constexpr (kPanelVectors > 2) AddQueries<3>(panel.lane, first, count, lanes);
        break;
    }
  }
}

template <int kVectors>
HWY_NOINLINE void GradientRun::PanelStep(const LanePanel& panel, int64_t first, int64_t count,
                                         bool masked) {
  Products<kVectors>(s_.q, s_.k + panel.lane * p_.dim, p_.dim, count, s_.weight);
  if (!plain_) FinishScores(panel, count);
  Products<kVectors>(s_.d_o, s_.v + panel.lane * p_.dim_v, p_.dim_v, count, s_.d_weight);
  if (p_.dropout > 0) {
    Draw(panel, first, count);
    Weigh<kVectors, true>(panel, count, masked);
  } else {
    Weigh<kVectors, false>(panel, count, masked);
  }
  if (task_.d_bias) AddBias(panel, count);
  if (p_.softcap > 0) Slope(panel, count);
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
    // Past the last row, the last one again: computed, then ignored.
    const float* block[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) block[r] = rows + std::min(n + r, count - 1) * kRowStride;
    ScoreBlock<kVectors>(block, panel, dim, out + n * kPanelLanes<kVectors>);
  }
}

// Everything of problem.h between q.k and the mask, as TileRun does it, and softcap's slope.
void GradientRun::FinishScores(const LanePanel& panel, int64_t count) {
  const F32 d;
  const V32 scale = hn::Set(d, p_.scale);
  const V32 cap = hn::Set(d, p_.softcap);
  const V32 inverse_cap = hn::Set(d, p_.softcap > 0 ? 1.0f / p_.softcap : 0.0f);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      const int64_t lane = panel.lane + n;
      const int64_t at = t * panel.width() + n;
      V32 x = hn::Mul(hn::Load(d, s_.weight + at), scale);
      if (p_.softcap > 0) {
        const V32 share = hn::CallTanh(d, hn::Mul(x, inverse_cap));
        hn::Store(hn::NegMulAdd(share, share, hn::Set(d, 1.0f)), d, s_.slope + at);
        x = hn::Mul(cap, share);
      }
      if (p_.has_bias) x = hn::Add(x, hn::Load(d, s_.bias + t * kGradientKeys + lane));
      if (p_.has_alibi) {
        const V32 key = hn::Iota(d, static_cast<float>(lane));
        const V32 distance = hn::Abs(hn::Sub(key, hn::Set(d, s_.diagonal[t])));
        x = hn::NegMulAdd(hn::Set(d, s_.alibi[t]), distance, x);
      }
      hn::Store(x, d, s_.weight + at);
    }
  }
}

// Dropout's draws of rows [first, first + count) and the panel's keys, from the tile of 16 keys on
// that the panel begins in.
void GradientRun::Draw(const LanePanel& panel, int64_t first, int64_t count) {
  const int64_t key = p_.key_offset + tile_ + panel.lane;
  const int64_t offset = key % kDropoutTile;
  const RoundKeys keys(a_.dropout.seed);
  const auto sequence = static_cast<uint64_t>(a_.dropout.sequence + task_.b);
  constexpr int64_t kHalf = kDropoutTile / 2;
  uint16_t* const nobody = s_.draws + kGradientRows * kDrawStride;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = a_.dropout.row + RowOf(first + t);
    const int64_t in_head = (first + t) % task_.rows;
    uint16_t* const own = s_.draws + t * kDrawStride;
    uint16_t* low = own;
    uint16_t* high = nobody;
    if (row % kDropoutTile >= kHalf) {
      if (t >= kHalf && in_head >= kHalf) continue;  // drawn with the row that it is 8 after
      low = nobody;
      high = own;
    } else if (t + kHalf < count && in_head + kHalf < task_.rows) {
      high = own + kHalf * kDrawStride;
    }
    DrawKeys(keys, sequence, a_.dropout.head + HeadOf(first + t), row, key - offset,
             offset + panel.width(), low, high);
  }
}

// P = exp(score - LSE) and dS = P (dP - less), both 0 where the key is not seen whatever dP is.
// With dropout, dP has its factor, and P is 0 where dV's is; what else that takes comes last.
template <int kVectors, bool kDropout>
void GradientRun::Weigh(const LanePanel& panel, int64_t count, bool masked) {
  constexpr float kLog2e = 1.44269504088896341f;
  const F32 d;
  const V32 factor = hn::Set(d, plain_ ? p_.scale : 1.0f);
  const V32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  const hn::RebindToSigned<F32> di;
  const auto limit = hn::Set(di, p_.dropout);
  const V32 kept = hn::Set(d, DropoutScale(p_.dropout));
  const int64_t offset = (p_.key_offset + tile_ + panel.lane) % kDropoutTile;
  for (int64_t t = 0; t < count; ++t) {
    const V32 base = hn::Set(d, s_.base[t]);
    const V32 less = hn::Set(d, s_.less[t]);
    const V32 begin = hn::Set(d, s_.begin[t]);
    const V32 end = hn::Set(d, s_.end[t]);
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = t * kPanelLanes<kVectors> + n * kLanes;
      V32 x = hn::MulSub(hn::Load(d, s_.weight + at), factor, base);
      if (masked) {
        const V32 key = hn::Iota(d, static_cast<float>(panel.lane + n * kLanes));
        x = hn::IfThenElse(hn::And(hn::Ge(key, begin), hn::Lt(key, end)), x, hidden);
      }
      // No weight is above 1, whatever LSE's rounding.
      const V32 p = Exp2(AtMost(hn::Zero(d), x), kLog2e);
      const V32 d_weight = hn::Load(d, s_.d_weight + at);
      V32 moved = hn::Sub(d_weight, less);
      V32 factor_of_v = p;
      if constexpr (kDropout) {
        const hn::Rebind<uint16_t, F32> d16;
        const auto draw = hn::LoadU(d16, s_.draws + t * kDrawStride + offset + n * kLanes);
        const auto dropped = hn::RebindMask(d, hn::Lt(hn::PromoteTo(di, draw), limit));
        moved = hn::IfThenElse(dropped, hn::Neg(less), hn::MulSub(d_weight, kept, less));
        factor_of_v = hn::IfThenZeroElse(dropped, p);
      }
      const V32 d_score = hn::Mul(p, moved);
      hn::Store(factor_of_v, d, s_.weight + at);
      hn::Store(hn::IfThenZeroElse(hn::Eq(x, hidden), d_score), d,
                s_.d_score + t * kGradientKeys + panel.lane + n * kLanes);
    }
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

// From dS by the score to dS by scale * q.k.
void GradientRun::Slope(const LanePanel& panel, int64_t count) {
  const F32 d;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      float* const at = s_.d_score + t * kGradientKeys + panel.lane + n;
      const V32 slope = hn::Load(d, s_.slope + t * panel.width() + n);
      hn::Store(hn::Mul(hn::Load(d, at), slope), d, at);
    }
  }
}

// sums[d][lane] += sum over rows of rows[row][d] * by[row][lane]: dV, or dK.
template <int kVectors>
void GradientRun::AddKeys(const float* rows, const float* by, int64_t by_stride, int64_t dim,
                          int64_t count, float* sums) {
  for (int64_t d = 0; d < dim; d += kBlockRows) {
    OutputBlock<kVectors, false>(rows + d, by, count, s_.ones, nullptr,
                                 sums + d * kPanelLanes<kVectors>, kRowStride, by_stride);
  }
}

// Columns [dim, dim + width) of dQ: each row's dS, over the lanes, times K's rows.
template <int kVectors>
HWY_NOINLINE void GradientRun::AddQueries(int64_t dim, int64_t first, int64_t count,
                                          const KeyRange& lanes) {
  const int64_t stride = PaddedDim(p_.dim);
  for (int64_t n = 0; n < count; n += kBlockRows) {
    const float* block[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) {
      block[r] = s_.d_score + std::min(n + r, count - 1) * kGradientKeys + lanes.begin;
    }
    ScoreBlock<kVectors, true>(block, s_.k_rows + lanes.begin * kRowStride + dim,
                               lanes.end - lanes.begin, task_.d_q + (first + n) * stride + dim,
                               kRowStride, stride);
  }
}

void RunGradients(const GradientTask& task, GradientScratch* scratch) {
  GradientRun(task, scratch).Run();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
