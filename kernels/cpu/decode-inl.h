// SPDX-License-Identifier: Apache-2.0
//
// Decodes one split of keys for all query rows of a KV head, and merges splits. Included once per
// instruction set by decode.cc; runs on any thread, on its own Scratch.
//
// Keys are taken a key tile at a time. After each, max, sum and O are every row's state
// (softmax_state.h) over the keys so far, with O not yet divided by sum. The states of splits are
// merged in order, in double except for O. A row that comes out NaN or Inf is computed again by the
// tile code, alone.

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

#include "hwy/contrib/math/math-inl.h"
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
    if (hidden == kKeyTile - (last - first)) {
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
  const V32 cap = hn::Set(d, p_.softcap);
  const V32 inverse_cap = hn::Set(d, p_.softcap > 0 ? 1.0f / p_.softcap : 0.0f);
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
    if (p_.softcap > 0) x = hn::Mul(cap, hn::CallTanh(d, hn::Mul(x, inverse_cap)));
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
  switch (v_shape_.type) {
    case DType::kFloat16:
      return AddValuesOf<DType::kFloat16>(values, first, last, next);
    case DType::kBFloat16:
      return AddValuesOf<DType::kBFloat16>(values, first, last, next);
    case DType::kFloat32:
      return AddValuesOf<DType::kFloat32>(values, first, last, next);
    case DType::kFloat64:  // refused by Select
    case DType::kBit:
      return;
  }
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
    std::copy(O(r), O(r) + v_shape_.width, partial + 2);
  }
}

void DecodeRun::MergeState() {
  for (int64_t r = 0; r < rows_; ++r) MergeRow(r, s_.max[r], s_.sum[r], O(r));
}

void DecodeRun::MergePartial(const float* partial) {
  for (int64_t r = 0; r < rows_; ++r, partial += PartialRowFloats(p_.dim_v)) {
    MergeRow(r, partial[0], partial[1], partial + 2);
  }
}

void DecodeRun::MergeRow(int64_t r, float max, float sum, const float* o) {
  if (sum == 0) return;  // no key was seen
  const MergeWeights<double> weights =
      Merge(merged_[r], {static_cast<double>(max) * unit_, static_cast<double>(sum)});
  const F32 d;
  const V32 left = hn::Set(d, static_cast<float>(weights.left));
  const V32 right = hn::Set(d, static_cast<float>(weights.right));
  for (int64_t n = 0; n < v_shape_.width; n += kLanes) {
    const V32 before = hn::Mul(left, hn::Load(d, Merged(r) + n));
    hn::Store(hn::MulAdd(right, hn::LoadU(d, o + n), before), d, Merged(r) + n);
  }
}

// Whether the row's O and sum are finite. If not, an input is NaN or Inf, or a sum has overflowed.
bool DecodeRun::Finite(int64_t r) const {
  const F32 d;
  V32 zero = hn::Zero(d);
  for (int64_t n = 0; n < v_shape_.width; n += kLanes) {
    zero = hn::MulAdd(hn::Load(d, Merged(r) + n), hn::Zero(d), zero);
  }
  return std::isfinite(merged_[r].sum) && hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

// Rows that are not finite get the tile code's bits, one row at a time, so that no row's bits
// depend on another's.
void DecodeRun::Store(TileFunction careful) {
  int64_t finite = 0;
  bool needs_care[kDecodeRows];
  for (int64_t r = 0; r < rows_; ++r) {
    needs_care[r] = !Finite(r);
    if (needs_care[r]) continue;
    StoreRow(r);
    ++finite;
  }
  if (finite == 0) return careful(tile_, &s_);
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
  NarrowRow(s_.rows, static_cast<float>(factor), p_.dim_v, p_.o_dtype(), a_.o.data,
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
