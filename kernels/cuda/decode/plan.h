// SPDX-License-Identifier: Apache-2.0
//
// How a decoding launch (decode.h) cuts its keys and shares them out. Host and device code: the
// blocks of a launch and the tests work it out alike.
//
// A *unit* is one KV head of one sequence with up to a tile's rows: all query heads of the group,
// row after row. Its keys are cut into *splits* at places that the sequence alone decides, so that
// no neighbour changes a bit. Splits of all units stand in one row, each with a cost; a *share* of
// that row is what one block computes. The answer over a split is a *partial*. Up to kFanIn splits
// make a *group*, whose partials are merged in order, and then those of a unit's groups.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

inline constexpr int kFanIn = 16;                   // partials that one merge takes
inline constexpr int kSplitsMax = kFanIn * kFanIn;  // of a unit
inline constexpr int kCostKeys = 64;                // keys that cost one
inline constexpr int kSplitCost = 1;                // of closing a split, beside its keys

// Short sequences have short splits: they alone must fill a device. A partial of many rows is worth
// more keys.
inline constexpr int kShortKeys = 2048;
inline constexpr int kMediumKeys = 8192;
inline constexpr int kShortSplit = 7;  // powers of two
inline constexpr int kMediumSplit = 9;
inline constexpr int kLongSplit = 11;

// Of numbers that are not negative. Most fit 32 bits, whose division takes a device a tenth of the
// time, and one thread works these out while others wait.
ATTEND_HD inline int64_t FastDivide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
ATTEND_HD inline int64_t CeilDivide(int64_t a, int64_t b) { return FastDivide(a + b - 1, b); }
ATTEND_HD inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// The splits of a sequence of k_len keys, for units of `rows`, have 2^SplitShift keys each: a
// multiple of kCostKeys.
ATTEND_HD inline int SplitShift(int64_t k_len, int64_t rows) {
  int shift = k_len <= kShortKeys ? kShortSplit : kMediumSplit;
  shift += rows > 32 ? 2 : rows > 16 ? 1 : 0;
  if (k_len > kMediumKeys) shift = rows > 32 ? kLongSplit + 1 : kLongSplit;
  while ((int64_t{kSplitsMax} << shift) < k_len) ++shift;
  return shift;
}
ATTEND_HD inline int64_t SplitKeys(int64_t k_len, int64_t rows) {
  return int64_t{1} << SplitShift(k_len, rows);
}

// The most splits of any sequence of up to k_len keys.
inline int64_t SplitsAtMost(int64_t k_len, int64_t rows) {
  int64_t most = 1;
  for (const int64_t keys : {int64_t{kShortKeys}, int64_t{kMediumKeys}, k_len}) {
    const int64_t least = Least(keys, k_len);
    most = std::max(most, CeilDivide(least, SplitKeys(least, rows)));
  }
  return CeilDivide(k_len, SplitKeys(k_len, rows)) * 2 > kSplitsMax ? kSplitsMax : most;
}

// How a sequence is cut. All of its units are cut alike.
struct SequencePlan {
  Sequence sequence;
  int32_t row_tiles = 0;
  int32_t units = 0;      // KV heads x row_tiles
  int32_t key_begin = 0;  // keys that some row sees
  int32_t key_end = 0;
  int32_t split_shift = 0;
  int32_t first_split = 0;  // of the sequence's splits, the first that has such keys
  int32_t splits = 1;       // from there on; one without keys if there are none
  int32_t split_cost = 0;

  ATTEND_HD int64_t unit_cost() const { return int64_t{splits} * split_cost; }
  ATTEND_HD int64_t cost() const { return units * unit_cost(); }
};

// `tile_rows`: a power of two.
ATTEND_HD inline SequencePlan PlanSequence(const Attention& a, int64_t b, int tile_rows) {
  const Problem& p = a.problem;
  SequencePlan plan;
  const Sequence s = SequenceOf(a, b);
  plan.sequence = s;
  const auto heads_kv = static_cast<uint32_t>(p.heads_kv);
  const int64_t rows = s.q_rows * (static_cast<uint32_t>(p.heads_q) / heads_kv);
  plan.row_tiles = static_cast<int32_t>(CeilDivide(rows, tile_rows));
  plan.units = static_cast<int32_t>(heads_kv) * plan.row_tiles;
  if (s.q_len > 0) {
    // Both ends of the visible range never fall as the row grows.
    const int64_t begin = VisibleKeys(p.mask, s, 0).begin;
    const int64_t end = VisibleKeys(p.mask, s, s.q_len - 1).end;
    if (begin < end) {
      plan.key_begin = static_cast<int32_t>(begin);
      plan.key_end = static_cast<int32_t>(end);
    }
  }
  plan.split_shift = SplitShift(s.k_len, Least(rows, tile_rows));
  plan.first_split = plan.key_begin >> plan.split_shift;
  const int64_t keys = int64_t{1} << plan.split_shift;
  const int64_t splits = ((plan.key_end + keys - 1) >> plan.split_shift) - plan.first_split;
  plan.splits = splits > 1 ? static_cast<int32_t>(splits) : 1;
  plan.split_cost = static_cast<int32_t>(keys / kCostKeys) + kSplitCost;
  return plan;
}

// The row of splits, cut into a share for each block: a split belongs to the share in which it
// begins.
struct Shares {
  int64_t total = 0;  // cost of all splits
  int64_t each = 1;   // of a share but the last
  int32_t blocks = 1;

  ATTEND_HD int64_t Begin(int share) const { return Least(share * each, total); }
  ATTEND_HD int64_t End(int share) const { return Begin(share + 1); }
  // `position` is below `total`.
  ATTEND_HD int Of(int64_t position) const { return static_cast<int>(FastDivide(position, each)); }
};

ATTEND_HD inline Shares CutShares(int64_t total, int blocks) {
  Shares shares;
  shares.total = total;
  shares.blocks = blocks;
  if (total > 0) shares.each = CeilDivide(total, blocks);
  return shares;
}

// Division by a number that the host knows, of numbers below 2^31: a multiplication.
struct Divisor {
  uint32_t factor = 1;
  int32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  ATTEND_HD int Of(int n) const {
    const auto high = static_cast<uint32_t>((uint64_t{factor} * static_cast<uint32_t>(n)) >> 32);
    return static_cast<int>((high + static_cast<uint32_t>(n)) >> shift);
  }
};

// One KV head's keys or values, dense or in pages. Distances are in units of 16 bytes.
struct KeySource {
  const char* data;      // of key 0, or of page 0
  uint32_t stride;       // between keys
  uint32_t page_stride;  // between pages
};
inline constexpr int kStrideUnit = 16;

// What a block computes next: splits [split, split_end) of one unit. In shared memory.
struct Segment {
  const Attention* attention;  // null: nothing
  KeySource k, v;
  const char* q;                   // of the sequence's first row and head
  int64_t q_stride_h, q_stride_l;  // bytes
  const int32_t* pages;            // of the sequence; null: K and V are dense
  int page_shift, page_mask;       // of a key's row in its page; all bits where there are none
  int b, h;                        // KV head
  int group;                       // query heads of it
  int row_begin;                   // packed row: query row * group + head of the group
  int rows;                        // packed rows that are written
  int key_begin, key_end;          // keys that some row of the unit sees
  int full_begin, full_end;        // keys that every one does
  int columns_k, columns_v;        // that exist
  int split_shift, first_split, splits, split_cost;
  int split, split_end;  // counted from first_split
  int64_t position;      // of the unit's first split
  Sequence sequence;
  float scale, softcap;
  bool has_alibi;
};

// What all units of a sequence have in common.
ATTEND_HD inline void DescribeSequence(const Attention& a, const SequencePlan& plan,
                                       Segment& segment) {
  const Problem& p = a.problem;
  segment.sequence = plan.sequence;
  segment.group =
      static_cast<int>(static_cast<uint32_t>(p.heads_q) / static_cast<uint32_t>(p.heads_kv));
  segment.split_shift = plan.split_shift;
  segment.first_split = plan.first_split;
  segment.splits = plan.splits;
  segment.split_cost = plan.split_cost;
  segment.q_stride_h = 2 * a.q.stride_h;
  segment.q_stride_l = 2 * a.q.stride_l;
  segment.k.stride = static_cast<uint32_t>(2 * a.k.stride_l / kStrideUnit);
  segment.k.page_stride = static_cast<uint32_t>(2 * a.k.stride_b / kStrideUnit);
  segment.v.stride = static_cast<uint32_t>(2 * a.v.stride_l / kStrideUnit);
  segment.v.page_stride = static_cast<uint32_t>(2 * a.v.stride_b / kStrideUnit);
  segment.columns_k = static_cast<int>(p.dim);
  segment.columns_v = static_cast<int>(p.dim_v);
  segment.page_mask = static_cast<int>(p.page_rows) - 1;
  segment.page_shift = 0;
  while ((int64_t{1} << segment.page_shift) < p.page_rows) ++segment.page_shift;
  segment.scale = p.scale;
  segment.softcap = p.softcap;
  segment.has_alibi = p.has_alibi;
}

// The segment's rows are up to `tile_rows` from `row_begin` on; the keys that they see.
ATTEND_HD inline void SetRowsAndKeys(const Mask& mask, int row_begin, int tile_rows,
                                     Segment& segment) {
  const Sequence& s = segment.sequence;
  segment.row_begin = row_begin;
  segment.rows = static_cast<int>(Least(tile_rows, s.q_rows * segment.group - row_begin));
  segment.key_begin = segment.key_end = segment.full_begin = segment.full_end = 0;
  const auto group = static_cast<uint32_t>(segment.group);
  const int64_t first = static_cast<uint32_t>(row_begin) / group;
  const int64_t last =
      Least(static_cast<uint32_t>(row_begin + segment.rows - 1) / group, s.q_len - 1);
  if (first > last) return;
  const KeyRange low = VisibleKeys(mask, s, first);
  const KeyRange high = VisibleKeys(mask, s, last);
  if (low.begin >= high.end) return;
  segment.key_begin = static_cast<int>(low.begin);
  segment.key_end = static_cast<int>(high.end);
  segment.full_begin = static_cast<int>(Least(high.begin, s.k_len));
  segment.full_end = low.end < 0 ? 0 : static_cast<int>(low.end);
}

// Groups of a unit's splits.
ATTEND_HD inline int GroupCount(int splits) { return (splits + kFanIn - 1) / kFanIn; }
ATTEND_HD inline int GroupSize(int splits, int group) {
  return static_cast<int>(Least(kFanIn, splits - group * kFanIn));
}

}  // namespace attend::cuda
