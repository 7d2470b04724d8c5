// SPDX-License-Identifier: Apache-2.0
//
// One split of keys for all query rows of a KV head, and the merging of splits. Included once per
// instruction set by decode.cc; runs on any thread, on its own Scratch.

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
#include "kernels/cpu/decode_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

class DecodeRun {
 public:
  DecodeRun(const Tile& tile, Scratch* scratch)
      : tile_(tile),
        a_(*tile.attention),
        p_(tile.attention->problem),
        s_(*scratch),
        sequence_(SequenceOf(*tile.attention, tile.b)),
        rows_(tile.heads * tile.rows),
        k_shape_(ShapeOf(p_.dtype, p_.dim)),
        v_shape_(ShapeOf(p_.dtype, p_.dim_v)),
        plain_(ScaledLate(p_)),
        bits_(HasBits(a_)),
        unit_(static_cast<double>(UnitOf(p_))),
        to_log2_(static_cast<float>(unit_ * 1.44269504088896341)) {}

  Splits splits() const { return SplitsOf(p_, sequence_); }
  bool stopped() const { return Stopped(tile_.stop); }

  // What Attend needs; what merging begins with.
  void PackQuery();
  void BeginMerge();
  // The state of each row over these keys, to s_.max, s_.sum and s_.o.
  void Attend(KeyRange keys);
  // Writes that state, or merges it into the answer so far; or merges one that was written.
  void StorePartial(float* partial) const;
  void MergeState();
  void MergePartial(const float* partial);
  // The rows of O and LSE.
  void Store(TileFunction careful);

 private:
  int64_t HeadOf(int64_t r) const { return tile_.head + r / tile_.rows; }
  int64_t RowOf(int64_t r) const { return tile_.row + r % tile_.rows; }
  // Rows of what the scratch has room for.
  float* Q(int64_t r) const { return s_.q + r * k_shape_.width; }
  float* O(int64_t r) const { return s_.o + r * kHeadDimMax; }
  float* Merged(int64_t r) const { return s_.down + r * kHeadDimMax; }
  float* Scores(int64_t r) const { return s_.s + r * kKeyTile; }

  void Locate(const ConstTensorView& view, int64_t block, int64_t first, int64_t last,
              BlockRows* rows) const;
  void Widen(const RowShape& shape, int64_t dim, int64_t first, int64_t last, float* out,
             BlockRows* rows) const;
  NextRows Next(const BlockRows& rows, const RowShape& shape) const;
  void Dot(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next);
  template <DType kType>
  void DotOf(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next);
  void Weigh(int64_t block, int64_t first, int64_t last);
  void FinishScores(int64_t r, int64_t block, int64_t begin, int64_t end);
  void MaskScores(int64_t r, int64_t begin, int64_t end);
  int64_t Softmax(int64_t r);
  void AddValues(const BlockRows& values, int64_t first, int64_t last, const NextRows& next);
  template <DType kType>
  void AddValuesOf(const BlockRows& values, int64_t first, int64_t last, const NextRows& next);
  template <DType kType, int kRows, bool kSkip>
  void AddRows(const BlockRows& values, int64_t first, int64_t last, const int64_t* rows,
               const NextRows& next);
  void MergeRow(int64_t r, float max, float sum, const float* o);
  bool Finite(int64_t r) const;
  void StoreRow(int64_t r);

  const Tile& tile_;
  const Attention& a_;
  const Problem& p_;
  Scratch& s_;
  const Sequence sequence_;
  const int64_t rows_;
  const RowShape k_shape_;
  const RowShape v_shape_;
  const bool plain_;  // scores are q.k still
  const bool bits_;   // remove keys
  // What a score is in units of problem.h, and in powers of two.
  const double unit_;
  const float to_log2_;
  SoftmaxState<double> merged_[kDecodeRows];
  // Rows that see all keys of the present block, and rows that see some.
  int64_t whole_[kDecodeRows];
  int64_t partly_[kDecodeRows];
  int64_t whole_count_ = 0;
  int64_t partly_count_ = 0;
};

void DecodeRun::PackQuery() {
  for (int64_t r = 0; r < rows_; ++r) {
    const int64_t index = tile_.b * a_.q.stride_b + HeadOf(r) * a_.q.stride_h +
                          (sequence_.q_row + RowOf(r)) * a_.q.stride_l;
    std::fill(s_.rows, s_.rows + kHeadDimMax, 0.0f);
    WidenRow(a_.q.data, p_.dtype, index, p_.dim, s_.rows);
    ForEachPlace(k_shape_, [&](int64_t element, int64_t place, bool again) {
      Q(r)[place] = again ? 0.0f : s_.rows[element];
    });
  }
}

void DecodeRun::BeginMerge() {
  for (int64_t r = 0; r < rows_; ++r) std::fill(Merged(r), Merged(r) + v_shape_.width, 0.0f);
}

void DecodeRun::Attend(KeyRange keys) {
  std::fill(s_.max, s_.max + rows_, kNothing);
  std::fill(s_.sum, s_.sum + rows_, 0.0f);
  for (int64_t r = 0; r < rows_; ++r) std::fill(O(r), O(r) + v_shape_.width, 0.0f);
  if (keys.begin >= keys.end) return;
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
    // While K is multiplied the caches fetch the block's V, and with V the next block's K.
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
}

// Where keys [first, last) of a block begin; keys beside them are where the nearest one is.
void DecodeRun::Locate(const ConstTensorView& view, int64_t block, int64_t first, int64_t last,
                       BlockRows* rows) const {
  rows->dim = &view == &a_.k ? p_.dim : p_.dim_v;
  const int64_t h_kv = tile_.head / p_.group();
  const int64_t step = view.stride_l * DTypeBytes(p_.dtype);
  for (int64_t n = first; n < last;) {  // once, unless K and V are in pages
    const int64_t run = EvenKeys(p_, block + n, last - n);
    const int64_t element = KeyElement(a_, view, sequence_, tile_.b, h_kv, block + n);
    const char* at = static_cast<const char*>(view.data) + element * DTypeBytes(p_.dtype);
    for (int64_t i = 0; i < run; ++i) rows->at[n + i] = at + i * step;
    n += run;
  }
  std::fill(rows->at, rows->at + first, rows->at[first]);
  std::fill(rows->at + last, rows->at + kKeyTile, rows->at[last - 1]);
}

// Rows that are shorter than a step: to fp32, followed by zeros.
void DecodeRun::Widen(const RowShape& shape, int64_t dim, int64_t first, int64_t last, float* out,
                      BlockRows* rows) const {
  for (int64_t j = first; j < last; ++j) {
    float* row = out + j * shape.width;
    WidenRow(rows->at[j], p_.dtype, 0, dim, row);
    std::fill(row + dim, row + shape.width, 0.0f);
  }
  for (int64_t j = 0; j < kKeyTile; ++j) {
    rows->at[j] = out + std::clamp(j, first, last - 1) * shape.width;
  }
  rows->dim = shape.dim;
}

NextRows DecodeRun::Next(const BlockRows& rows, const RowShape& shape) const {
  return {&rows, 0, shape.widened ? 0 : shape.dim * DTypeBytes(p_.dtype)};
}

void DecodeRun::Dot(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next) {
  switch (k_shape_.type) {
    case DType::kFloat16:
      return DotOf<DType::kFloat16>(keys, first, last, next);
    case DType::kBFloat16:
      return DotOf<DType::kBFloat16>(keys, first, last, next);
    case DType::kFloat32:
      return DotOf<DType::kFloat32>(keys, first, last, next);
    case DType::kFloat64:  // Select keeps it away
    case DType::kBit:
      return;
  }
}

template <DType kType>
HWY_NOINLINE void DecodeRun::DotOf(const BlockRows& keys, int64_t first, int64_t last,
                                   const NextRows& next) {
  constexpr int64_t kKeys = 8;
  const int64_t width = k_shape_.width;
  for (int64_t j = first / kKeys * kKeys; j < last; j += kKeys) {
    int64_t r = 0;
    if constexpr (kSums == 16) {
      for (; r + 4 <= rows_; r += 4) {
        for (int64_t k = j; k < j + kKeys; k += 4) {
          if (r == 0) next.Prefetch(k, 4);
          DotBlock<kType, 4, 4>(keys, k, Q(r), width, Scores(r));
        }
      }
    }
    for (; r + 2 <= rows_; r += 2) {
      for (int64_t k = j; k < j + kKeys; k += 4) {
        if (r == 0) next.Prefetch(k, 4);
        DotBlock<kType, 2, 4>(keys, k, Q(r), width, Scores(r));
      }
    }
    if (r == rows_) continue;
    if (r == 0) next.Prefetch(j, kKeys);
    DotBlock<kType, 1, kKeys>(keys, j, Q(r), width, Scores(r));
  }
}

// From q.k of keys [first, last) of a block to weights, for the rows that see any of them.
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

// Everything of problem.h between q.k and the mask.
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

// Turns a row's scores into weights exp(s - max), those of hidden keys into -0, and brings its
// maximum and sum up to date; s_.weight is what O so far must be multiplied by. Returns how many
// keys of the block are hidden.
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
  // A NaN may be lost here; its weight is NaN all the same.
  const float max = std::max(s_.max[r], hn::GetLane(hn::MaxOfLanes(d, most)));
  // Nothing seen yet: subtract 0, as -inf - -inf is NaN.
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
    case DType::kFloat64:  // Select keeps it away
    case DType::kBit:
      return;
  }
}

template <DType kType>
void DecodeRun::AddValuesOf(const BlockRows& values, int64_t first, int64_t last,
                            const NextRows& next) {
  int64_t r = 0;
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
  if (sum == 0) return;  // it saw nothing
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

// False if the row needs care: something in it is NaN or Inf, or its sums have left fp32's range.
bool DecodeRun::Finite(int64_t r) const {
  const F32 d;
  V32 zero = hn::Zero(d);
  for (int64_t n = 0; n < v_shape_.width; n += kLanes) {
    zero = hn::MulAdd(hn::Load(d, Merged(r) + n), hn::Zero(d), zero);
  }
  return std::isfinite(merged_[r].sum) && hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

// Rows that need care have the bits of the tile code, and no row has another's.
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
