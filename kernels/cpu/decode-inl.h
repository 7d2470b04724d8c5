// SPDX-License-Identifier: Apache-2.0
//
// Decodes one split of keys for all query rows of a KV head, and merges splits. Included once per
// instruction set by decode.cc; runs on any thread, on its own Scratch.
//
// Keys are taken a key tile at a time. After each, max, sum and O are every row's state
// (softmax_state.h) over the keys so far, with O not yet divided by sum. The states of splits are
// merged in order, in double except for O. Keys that leave a row NaN or Inf are computed again,
// with care that V's NaN and Inf reach what they must. A row that comes out so though a finite
// input may be the reason is computed again by the tile code, alone.

#if defined(ATTEND_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_DECODE_INL_H_
#undef ATTEND_CPU_DECODE_INL_H_
#else
#define ATTEND_CPU_DECODE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "hwy/highway.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/decode_amx-inl.h"
#include "kernels/cpu/decode_math-inl.h"
#include "kernels/cpu/decode_run-inl.h"
#include "kernels/cpu/flash_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

void DecodeRun::BeginMerge() {
  for (int64_t r = 0; r < rows_; ++r) std::fill(Merged(r), Merged(r) + v_shape_.width, 0.0f);
}

void DecodeRun::Attend(KeyRange keys) {
  const auto finite = [&](int64_t r) { return std::isfinite(s_.sum[r]) && Finite(O(r)); };
  std::fill_n(outcome_, rows_, kFinite);
  AttendOnce(keys);
  bool all = true;
  for (int64_t r = 0; r < rows_; ++r) all = all && finite(r);
  if (all) return;
  careful_ = true;
  for (int64_t r = 0; r < rows_; ++r) {
    spread_[r] = false;
    doubtful_[r] = LookAtRow(Q(r), k_shape_.width).large;
  }
  AttendOnce(keys);
  careful_ = special_values_ = false;
  for (int64_t r = 0; r < rows_; ++r) {
    if (!finite(r)) outcome_[r] = doubtful_[r] ? kDoubtful : kSpecial;
  }
}

// Sums of products of finite numbers stay finite if none is large.
DecodeRun::Looks DecodeRun::LookAtRow(const float* row, int64_t width) const {
  const F32 d;
  Looks found;
  for (int64_t i = 0; i < width; i += kLanes) {
    const V32 x = hn::Load(d, row + i);
    const auto finite = hn::IsFinite(x);
    const auto large = hn::And(finite, hn::Gt(hn::Abs(x), hn::Set(d, 0x1p58f)));
    found.special = found.special || !hn::AllTrue(d, finite);
    found.large = found.large || !hn::AllFalse(d, large);
  }
  return found;
}

// Looks at a block's K and V, before they are widened.
void DecodeRun::LookAtBlock(const BlockRows& k, const BlockRows& v, int64_t first, int64_t last) {
  const auto look = [&](const BlockRows& rows, int64_t j) {
    std::fill(s_.rows, s_.rows + kHeadDimMax, 0.0f);
    WidenRow(rows.at[j], p_.dtype, 0, rows.dim, s_.rows);
    return LookAtRow(s_.rows, kHeadDimMax);
  };
  special_values_ = false;
  for (int64_t j = 0; j < kKeyTile; ++j) {
    unsure_[j] = false;
    if (j < first || j >= last) continue;
    const Looks of_k = look(k, j), of_v = look(v, j);
    // Where steps overlap, Inf is multiplied by 0 too.
    const bool overlapped = of_k.special && p_.dim < k_shape_.width;
    unsure_[j] = of_k.large || of_v.large || overlapped;
    special_values_ = special_values_ || of_v.special;
  }
}

void DecodeRun::AttendOnce(KeyRange keys) {
  std::fill(s_.max, s_.max + rows_, kNothing);
  std::fill(s_.sum, s_.sum + rows_, 0.0f);
  for (int64_t r = 0; r < rows_; ++r) std::fill(O(r), O(r) + v_shape_.width, 0.0f);
  if (keys.begin >= keys.end) return;
  if (tiles_) CurrentTileUnit().begin();
  const auto first_of = [&](int64_t block) { return std::max(keys.begin - block, int64_t{0}); };
  const auto last_of = [&](int64_t block) { return std::min(keys.end - block, kKeyTile); };
  BlockRows two[2], v;
  BlockRows* k = &two[0];
  BlockRows* next_k = &two[1];
  int64_t block = keys.begin / kKeyTile * kKeyTile;
  Locate(a_.k, block, first_of(block), last_of(block), k);
  Next(*k, k_shape_).Prefetch(0, kKeyTile);
  for (; block < keys.end && !stopped(); block += kKeyTile, std::swap(k, next_k)) {
    const int64_t first = first_of(block);
    const int64_t last = last_of(block);
    // The caches fetch the block's V while K is multiplied, and the next block's K while V is.
    Locate(a_.v, block, first, last, &v);
    if (careful_) LookAtBlock(*k, v, first, last);
    const NextRows fetch_v = Next(v, v_shape_);
    if (k_shape_.widened) Widen(k_shape_, p_.dim, first, last, s_.k, k);
    Dot(*k, first, last, fetch_v);
    Weigh(block, first, last);
    NextRows fetch_k;
    const int64_t after = block + kKeyTile;
    if (after < keys.end) {
      Locate(a_.k, after, 0, last_of(after), next_k);
      fetch_k = Next(*next_k, k_shape_);
    }
    if (v_shape_.widened) Widen(v_shape_, p_.dim_v, first, last, s_.v, &v);
    AddValues(v, first, last, fetch_k);
    for (int64_t r = 0; r < rows_ && special_values_; ++r) spread_[r] = !Finite(O(r));
  }
  if (tiles_) CurrentTileUnit().end();
}

// Turns q.k of a block's keys [first, last) into weights, for the rows that see any of them.
void DecodeRun::Weigh(int64_t block, int64_t first, int64_t last) {
  whole_count_ = partly_count_ = 0;
  for (int64_t r = 0; r < rows_; ++r) {
    const KeyRange range = VisibleKeys(p_.mask, sequence_, RowOf(r));
    const int64_t begin = std::clamp<int64_t>(range.begin - block, 0, kKeyTile);
    const int64_t end = std::clamp<int64_t>(range.end - block, 0, kKeyTile);
    if (begin >= end) continue;
    if (!plain_) FinishScores(r, block, begin, end);
    if (begin > 0 || end < kKeyTile) MaskScores(r, begin, end);
    const int64_t hidden = Softmax(r);
    for (int64_t j = 0; j < kKeyTile && careful_; ++j) {
      doubtful_[r] = doubtful_[r] || (unsure_[j] && !IsHiddenWeight(Scores(r)[j]));
    }
    const bool apart = careful_ && (special_values_ || spread_[r]);
    if (hidden == kKeyTile - (last - first) && !apart) {
      whole_[whole_count_++] = r;
    } else {
      partly_[partly_count_++] = r;
    }
  }
}

// Applies all steps of problem.h between q.k and the mask.
void DecodeRun::FinishScores(int64_t r, int64_t block, int64_t begin, int64_t end) {
  const F32 d;
  const V32 scale = hn::Set(d, p_.scale);
  const LaneCap cap(p_);
  const V32 diagonal = hn::Set(d, static_cast<float>(RowOf(r) + sequence_.offset - block));
  const V32 slope =
      hn::Set(d, p_.has_alibi ? a_.alibi_slopes[tile_.b * a_.alibi_stride_b + HeadOf(r)] : 0.0f);
  if (p_.has_bias) {
    const int64_t index = tile_.b * a_.bias.stride_b + HeadOf(r) * a_.bias.stride_h +
                          RowOf(r) * a_.bias.stride_q + block;
    std::fill(s_.bias, s_.bias + kKeyTile, 0.0f);
    WidenRow(a_.bias.data, a_.bias.dtype, index + begin, end - begin, s_.bias + begin);
  }
  for (int64_t n = 0; n < kKeyTile; n += kLanes) {
    V32 x = hn::Mul(hn::Load(d, Scores(r) + n), scale);
    if (cap.on()) x = cap.OfTanh(cap.Tanh(x));
    if (p_.has_bias && !bits_) x = hn::Add(x, hn::Load(d, s_.bias + n));
    if (p_.has_alibi) {
      const V32 key = hn::Iota(d, static_cast<float>(n));
      x = hn::NegMulAdd(slope, hn::Abs(hn::Sub(key, diagonal)), x);
    }
    hn::Store(bits_ ? WithoutRemoved(x, s_.bias + n) : x, d, Scores(r) + n);
  }
}

void DecodeRun::MaskScores(int64_t r, int64_t begin, int64_t end) {
  const F32 d;
  const V32 from = hn::Set(d, static_cast<float>(begin));
  const V32 to = hn::Set(d, static_cast<float>(end));
  for (int64_t n = 0; n < kKeyTile; n += kLanes) {
    const V32 key = hn::Iota(d, static_cast<float>(n));
    const auto visible = hn::And(hn::Ge(key, from), hn::Lt(key, to));
    const V32 x = hn::Load(d, Scores(r) + n);
    hn::Store(hn::IfThenElse(visible, x, hn::Set(d, kNothing)), d, Scores(r) + n);
  }
}

// Turns a row's scores into weights exp(s - max), with -0 for hidden keys, and updates its max and
// sum. Sets s_.weight to the factor for O so far. Returns how many keys of the block are hidden.
int64_t DecodeRun::Softmax(int64_t r) {
  const F32 d;
  const V32 nothing = hn::Set(d, kNothing);
  V32 most = nothing;
  int64_t hidden = 0;
  for (int64_t n = 0; n < kKeyTile; n += kLanes) {
    const V32 x = hn::Load(d, Scores(r) + n);
    most = hn::Max(most, x);
    hidden += static_cast<int64_t>(hn::CountTrue(d, hn::Eq(x, nothing)));
  }
  // A NaN may be lost here, but its weight is NaN anyway.
  const float max = std::max(s_.max[r], hn::GetLane(hn::MaxOfLanes(d, most)));
  // If no key was seen yet, subtract 0: -inf - -inf is NaN.
  const V32 base = hn::Set(d, max == kNothing ? 0.0f : max);
  const V32 lower = hn::Sub(hn::Set(d, s_.max[r]), base);
  const float before = max == s_.max[r] ? 1.0f : hn::GetLane(Exp2(lower, to_log2_));
  V32 sum = hn::Zero(d);
  for (int64_t n = 0; n < kKeyTile; n += kLanes) {
    const V32 x = hn::Load(d, Scores(r) + n);
    const V32 p = Exp2(hn::Sub(x, base), to_log2_);
    hn::Store(hn::IfThenElse(hn::Eq(x, nothing), hn::Set(d, -0.0f), p), d, Scores(r) + n);
    sum = hn::Add(sum, p);
  }
  s_.max[r] = max;
  s_.sum[r] = s_.sum[r] * before + hn::GetLane(hn::SumOfLanes(d, sum));
  s_.weight[r] = before;
  return hidden;
}

void DecodeRun::AddValues(const BlockRows& values, int64_t first, int64_t last,
                          const NextRows& next) {
  WithDType(v_shape_.type, [&]<DType kType>() { AddValuesOf<kType>(values, first, last, next); });
}

template <DType kType>
void DecodeRun::AddValuesOf(const BlockRows& values, int64_t first, int64_t last,
                            const NextRows& next) {
  int64_t r = 0;
#if ATTEND_IS_AVX512(HWY_TARGET)
  if (tiles_ && whole_count_ > 0 && PackValueTiles(values, next.Part(0, whole_count_, rows_))) {
    AddValueTiles();
    r = whole_count_;
  }
#endif
  for (; r + 4 <= whole_count_; r += 4) {
    AddRows<kType, 4, false>(values, first, last, whole_ + r, next.Part(r, r + 4, rows_));
  }
  for (; r + 2 <= whole_count_; r += 2) {
    AddRows<kType, 2, false>(values, first, last, whole_ + r, next.Part(r, r + 2, rows_));
  }
  for (; r < whole_count_; ++r) {
    AddRows<kType, 1, false>(values, first, last, whole_ + r, next.Part(r, r + 1, rows_));
  }
  for (int64_t n = 0; n < partly_count_; ++n, ++r) {
    AddRows<kType, 1, true>(values, first, last, partly_ + n, next.Part(r, r + 1, rows_));
  }
}

template <DType kType, int kRows, bool kSkip>
void DecodeRun::AddRows(const BlockRows& values, int64_t first, int64_t last, const int64_t* rows,
                        const NextRows& next) {
  WeightRows<kRows> weights;
  for (int r = 0; r < kRows; ++r) {
    weights.p[r] = Scores(rows[r]);
    weights.o[r] = O(rows[r]);
    weights.before[r] = s_.weight[rows[r]];
  }
  Accumulate<kType, kRows, kSkip>(values, first, last, weights, next);
}

void DecodeRun::StorePartial(float* partial) const {
  for (int64_t r = 0; r < rows_; ++r, partial += PartialRowFloats(p_.dim_v)) {
    partial[0] = s_.max[r];
    partial[1] = s_.sum[r];
    partial[2] = outcome_[r];
    std::copy(O(r), O(r) + v_shape_.width, partial + 3);
  }
}

void DecodeRun::MergeState() {
  for (int64_t r = 0; r < rows_; ++r) MergeRow(r, s_.max[r], s_.sum[r], outcome_[r], O(r));
}

void DecodeRun::MergePartial(const float* partial) {
  for (int64_t r = 0; r < rows_; ++r, partial += PartialRowFloats(p_.dim_v)) {
    MergeRow(r, partial[0], partial[1], partial[2], partial + 3);
  }
}

// NaN and Inf stay, however small the factor.
void DecodeRun::MergeRow(int64_t r, float max, float sum, float outcome, const float* o) {
  merged_outcome_[r] = std::max(merged_outcome_[r], outcome);
  if (sum == 0) return;  // no key was seen
  const MergeWeights<double> weights =
      Merge(merged_[r], {static_cast<double>(max) * unit_, static_cast<double>(sum)});
  const F32 d;
  const V32 left = hn::Set(d, static_cast<float>(weights.left));
  const V32 right = hn::Set(d, static_cast<float>(weights.right));
  for (int64_t n = 0; n < v_shape_.width; n += kLanes) {
    const V32 merged = hn::Load(d, Merged(r) + n), more = hn::LoadU(d, o + n);
    const V32 before = hn::IfThenElse(hn::IsFinite(merged), hn::Mul(left, merged), merged);
    const V32 after = hn::MulAdd(right, more, before);
    hn::Store(hn::IfThenElse(hn::IsFinite(more), after, hn::Add(more, before)), d, Merged(r) + n);
  }
}

// Whether a row of O is finite. If not, an input is NaN or Inf, or a sum has overflowed.
bool DecodeRun::Finite(const float* o) const {
  const F32 d;
  V32 zero = hn::Zero(d);
  for (int64_t n = 0; n < v_shape_.width; n += kLanes) {
    zero = hn::MulAdd(hn::Load(d, o + n), hn::Zero(d), zero);
  }
  return hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

// Rows that are in doubt get the tile code's bits, one row at a time, so that no row's bits depend
// on another's.
void DecodeRun::Store(TileFunction careful) {
  int64_t stored = 0;
  bool needs_care[kDecodeRows];
  for (int64_t r = 0; r < rows_; ++r) {
    const bool finite = std::isfinite(merged_[r].sum) && Finite(Merged(r));
    needs_care[r] = merged_outcome_[r] == kDoubtful || (!finite && merged_outcome_[r] == kFinite);
    if (needs_care[r]) continue;
    StoreRow(r);
    ++stored;
  }
  if (stored == 0) return careful(tile_, &s_);
  for (int64_t r = 0; r < rows_; ++r) {
    if (!needs_care[r]) continue;
    Tile row = tile_;
    row.head = HeadOf(r);
    row.row = RowOf(r);
    row.heads = row.rows = 1;
    careful(row, &s_);
  }
}

void DecodeRun::StoreRow(int64_t r) {
  const int64_t h = HeadOf(r);
  const int64_t row = sequence_.q_row + RowOf(r);
  SoftmaxState<double> state = merged_[r];
  const double sum = state.sum;
  double factor = 1;
  if (p_.has_sinks) factor = AddSink(state, static_cast<double>(a_.sinks[h]));
  factor = sum == 0 ? 0 : factor * InverseSum(state);
  ForEachPlace(v_shape_,
               [&](int64_t element, int64_t place, bool) { s_.rows[element] = Merged(r)[place]; });
  auto by = static_cast<float>(factor);
  if (merged_outcome_[r] == kSpecial) {
    for (int64_t n = 0; n < p_.dim_v; ++n) {
      // NaN and Inf stay, even if `factor` underflows in fp32.
      if (std::isfinite(s_.rows[n]) || !(factor > 0)) s_.rows[n] *= by;
    }
    by = 1;
  }
  NarrowRow(s_.rows, by, p_.dim_v, p_.o_dtype(), a_.o.data,
            tile_.b * a_.o.stride_b + h * a_.o.stride_h + row * a_.o.stride_l);
  if (p_.return_lse) {
    a_.lse[tile_.b * a_.lse_stride_b + h * a_.lse_stride_h + row] =
        static_cast<float>(LogSumExp(state));
  }
}

void DecodeSplit(const Tile& tile, int64_t n, float* partial, Scratch* scratch) {
  DecodeRun run(tile, scratch);
  if (run.stopped()) return;
  run.PackQuery();
  run.Attend(run.splits()[n]);
  run.StorePartial(partial);
}

void FinishDecode(const Tile& tile, const float* partials, TileFunction careful, Scratch* scratch) {
  DecodeRun run(tile, scratch);
  if (run.stopped()) return;
  run.BeginMerge();
  const int64_t count = run.splits().count;
  for (int64_t n = 0; n < count; ++n) run.MergePartial(partials + n * PartialFloats(tile));
  run.Store(careful);
}

void DecodeWhole(const Tile& tile, TileFunction careful, Scratch* scratch) {
  DecodeRun run(tile, scratch);
  if (run.stopped()) return;
  run.PackQuery();
  run.BeginMerge();
  const Splits splits = run.splits();
  for (int64_t n = 0; n < splits.count && !run.stopped(); ++n) {
    run.Attend(splits[n]);
    run.MergeState();
  }
  if (!run.stopped()) run.Store(careful);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
