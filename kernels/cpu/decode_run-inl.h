// SPDX-License-Identifier: Apache-2.0
//
// The query rows of a KV head that are decoded: loading, and products with K. Continued in
// decode-inl.h. Included once per instruction set; runs on any thread, on its own Scratch.

#if defined(ATTEND_CPU_DECODE_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_DECODE_RUN_INL_H_
#undef ATTEND_CPU_DECODE_RUN_INL_H_
#else
#define ATTEND_CPU_DECODE_RUN_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/decode.h"
#include "kernels/cpu/decode_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A row's outcome, as partials have it: finite; NaN or Inf as its inputs demand; or not finite,
// perhaps for another reason.
constexpr float kFinite = 0, kSpecial = 1, kDoubtful = 2;

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
        pairs_(kHavePairs && k_shape_.type == DType::kBFloat16 && TakesPairs(p_)),
        tiles_(pairs_ && tile.amx && p_.dim % kAmxBlock == 0 && p_.dim_v % kAmxBlock == 0),
        bits_(HasBits(a_)),
        unit_(static_cast<double>(UnitOf(p_))),
        to_log2_(static_cast<float>(unit_ * 1.44269504088896341)) {}

  Splits splits() const { return SplitsOf(p_, sequence_); }
  bool stopped() const { return Stopped(tile_.stop); }

  // Called before Attend and before merging.
  void PackQuery();
  void PackPairs(int64_t r, const uint16_t* row);
  void BeginMerge();
  // Computes each row's state over these keys into s_.max, s_.sum and s_.o, and its outcome.
  void Attend(KeyRange keys);
  // Writes that state, merges it into the result so far, or merges one that was written.
  void StorePartial(float* partial) const;
  void MergeState();
  void MergePartial(const float* partial);
  // Stores the rows of O and LSE.
  void Store(TileFunction careful);

 private:
  int64_t HeadOf(int64_t r) const { return tile_.head + r / tile_.rows; }
  int64_t RowOf(int64_t r) const { return tile_.row + r % tile_.rows; }
  // Rows within the scratch.
  float* Q(int64_t r) const { return s_.q + r * k_shape_.width; }
  // Q as bf16 words, in memory order.
  uint16_t* Pairs(int64_t r) const {
    return reinterpret_cast<uint16_t*>(s_.q_pairs) + r * k_shape_.width;
  }
  float* O(int64_t r) const { return s_.o + r * kHeadDimMax; }
  float* Merged(int64_t r) const { return s_.down + r * kHeadDimMax; }
  float* Scores(int64_t r) const { return s_.s + r * kKeyTile; }

  // For decode_amx-inl.h: Q, a block's V, and its weights.
  int64_t TileLanes() const { return rows_ <= kLanes ? kLanes : kAmxPanelLanes; }
  float* QueryTiles() const { return s_.q_pairs + kAmxPanelLanes * kHeadDimMax / 2; }
  uint16_t* ValueTiles() const { return reinterpret_cast<uint16_t*>(s_.v); }
  uint16_t* WeightTiles() const { return ValueTiles() + kKeyTile * kHeadDimMax; }
  static_assert(sizeof(Scratch::v) >= (kHeadDimMax + kAmxBlock) * kKeyTile * sizeof(uint16_t));
  void PackTiles();
  void DotTiles(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next);
  bool PackValueTiles(const BlockRows& values, const NextRows& next);
  void AddValueTiles();

  void AttendOnce(KeyRange keys);
  struct Looks {
    bool special = false;  // NaN or Inf
    bool large = false;
  };
  Looks LookAtRow(const float* row, int64_t width) const;
  void LookAtBlock(const BlockRows& k, const BlockRows& v, int64_t first, int64_t last);
  void Locate(const ConstTensorView& view, int64_t block, int64_t first, int64_t last,
              BlockRows* rows) const;
  void Widen(const RowShape& shape, int64_t dim, int64_t first, int64_t last, float* out,
             BlockRows* rows) const;
  NextRows Next(const BlockRows& rows, const RowShape& shape) const;
  void Dot(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next);
  template <DType kType, class Element>
  void DotOf(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next,
             const Element* q);
  void DotUnpaired(const BlockRows& keys, int64_t first, int64_t last);
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
  void MergeRow(int64_t r, float max, float sum, float outcome, const float* o);
  bool Finite(const float* o) const;
  void StoreRow(int64_t r);

  const Tile& tile_;
  const Attention& a_;
  const Problem& p_;
  Scratch& s_;
  const Sequence sequence_;
  const int64_t rows_;
  const RowShape k_shape_;
  const RowShape v_shape_;
  const bool plain_;  // scores are q.k without scale
  const bool pairs_;  // q.k is added in pairs, except for the rows of `unpaired_`
  const bool tiles_;  // in tiles, as far as they can
  const bool bits_;   // the bias is a mask of bits
  // One unit of a score, in units of problem.h and in powers of two.
  const double unit_;
  const float to_log2_;
  SoftmaxState<double> merged_[kDecodeRows];
  float outcome_[kDecodeRows] = {};         // of Attend
  float merged_outcome_[kDecodeRows] = {};  // the largest
  // Attend computes keys again that left a row not finite. Rows then feel NaN and Inf of V however
  // small their weight, from the block on that has them.
  bool careful_ = false;
  bool special_values_ = false;  // the block's V has NaN or Inf
  bool unsure_[kKeyTile];        // keys of the block that may leave finite rows not finite
  bool doubtful_[kDecodeRows];   // rows that see such a key, or have a large Q
  bool spread_[kDecodeRows];     // rows whose O has felt some
  // Rows that see all keys of the current block, and rows that see some.
  int64_t whole_[kDecodeRows];
  int64_t partly_[kDecodeRows];
  int64_t unpaired_[kDecodeRows];
  int64_t unpaired_count_ = 0;
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
    if (pairs_) PackPairs(r, static_cast<const uint16_t*>(a_.q.data) + index);
  }
#if ATTEND_IS_AVX512(HWY_TARGET)
  if (tiles_) PackTiles();
#endif
}

// `row` is row r of Q in bf16; s_.rows holds it as fp32.
void DecodeRun::PackPairs(int64_t r, const uint16_t* row) {
  constexpr int64_t kWords = kStep<DType::kBFloat16>;
  for (int64_t t = 0; t * kWords < k_shape_.width; ++t) {
    const int64_t begin = StepBegin<DType::kBFloat16>(t, p_.dim);
    const int64_t again = t * kWords - begin;  // elements that the step before holds
    std::fill_n(Pairs(r) + t * kWords, again, uint16_t{0});
    std::copy(row + begin + again, row + begin + kWords, Pairs(r) + t * kWords + again);
  }
  if (!FitsPairs(s_.rows, p_.dim)) unpaired_[unpaired_count_++] = r;
}

// Finds the addresses of keys [first, last) of a block. Other places get the nearest key's.
void DecodeRun::Locate(const ConstTensorView& view, int64_t block, int64_t first, int64_t last,
                       BlockRows* rows) const {
  rows->dim = &view == &a_.k ? p_.dim : p_.dim_v;
  const int64_t h_kv = tile_.head / p_.group();
  const int64_t step = view.stride_l * DTypeBytes(p_.dtype);
  for (int64_t n = first; n < last;) {  // one round, unless K and V are paged
    const int64_t run = EvenKeys(p_, block + n, last - n);
    const int64_t element = KeyElement(a_, view, sequence_, tile_.b, h_kv, block + n);
    const char* at = static_cast<const char*>(view.data) + element * DTypeBytes(p_.dtype);
    for (int64_t i = 0; i < run; ++i) rows->at[n + i] = at + i * step;
    n += run;
  }
  std::fill(rows->at, rows->at + first, rows->at[first]);
  std::fill(rows->at + last, rows->at + kKeyTile, rows->at[last - 1]);
}

// Widens rows shorter than a step to fp32, padded with zeros.
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
#if ATTEND_IS_AVX512(HWY_TARGET)
  if (pairs_) {
    tiles_ ? DotTiles(keys, first, last, next)
           : DotOf<DType::kBFloat16>(keys, first, last, next, Pairs(0));
    return DotUnpaired(keys, first, last);
  }
#endif
  WithDType(k_shape_.type, [&]<DType kType>() { DotOf<kType>(keys, first, last, next, Q(0)); });
}

// `q` has rows as DotBlock takes them.
template <DType kType, class Element>
HWY_NOINLINE void DecodeRun::DotOf(const BlockRows& keys, int64_t first, int64_t last,
                                   const NextRows& next, const Element* q) {
  constexpr int64_t kKeys = 8;
  const int64_t width = k_shape_.width;
  for (int64_t j = first / kKeys * kKeys; j < last; j += kKeys) {
    int64_t r = 0;
    if constexpr (kSums == 16) {
      for (; r + 4 <= rows_; r += 4) {
        for (int64_t k = j; k < j + kKeys; k += 4) {
          if (r == 0) next.Prefetch(k, 4);
          DotBlock<kType, 4, 4>(keys, k, q + r * width, width, Scores(r));
        }
      }
    }
    for (; r + 2 <= rows_; r += 2) {
      for (int64_t k = j; k < j + kKeys; k += 4) {
        if (r == 0) next.Prefetch(k, 4);
        DotBlock<kType, 2, 4>(keys, k, q + r * width, width, Scores(r));
      }
    }
    if (r == rows_) continue;
    if (r == 0) next.Prefetch(j, kKeys);
    DotBlock<kType, 1, kKeys>(keys, j, q + r * width, width, Scores(r));
  }
}

// Computes again, without pairs, the rows that do not fit them.
void DecodeRun::DotUnpaired(const BlockRows& keys, int64_t first, int64_t last) {
  constexpr int64_t kKeys = 8;
  for (int64_t n = 0; n < unpaired_count_; ++n) {
    const int64_t r = unpaired_[n];
    for (int64_t j = first / kKeys * kKeys; j < last; j += kKeys) {
      DotBlock<DType::kBFloat16, 1, kKeys>(keys, j, Q(r), k_shape_.width, Scores(r));
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
