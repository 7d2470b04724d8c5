// SPDX-License-Identifier: Apache-2.0
//
// How a decoding launch (decode.h) splits its keys and distributes them. Host and device code:
// tests compute the same plan as a launch's blocks.
//
// A *unit* is one KV head of one sequence with up to a tile's rows: all query heads of the group,
// row by row. More rows are cut into *chunks*, units of their own. A unit's keys are cut into
// *splits* by its sequence's length and the request's most query rows, so that no other request
// changes a bit. The splits of all units form one line, each with a cost; a *share* of that line is
// one block's work. The answer over a split is a *partial*. Up to kFanIn splits form a *group*,
// whose partials are merged in order, and then those of a unit's groups.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

inline constexpr int kFanIn = 16;                   // partials per merge
inline constexpr int kSplitsMax = kFanIn * kFanIn;  // per unit
inline constexpr int kCostKeys = 64;                // keys per unit of cost
inline constexpr int kSplitCost = 1;                // of closing a split

// Short sequences have short splits, because they must fill the device by themselves. Partials of
// many rows are expensive, so splits are twice as long from 17 rows on up to kMediumKeys, and from
// 33 on beyond kManyRowsKeys.
inline constexpr int kShortKeys = 2048;
inline constexpr int kMediumKeys = 8192;
inline constexpr int kManyRowsKeys = 16384;
inline constexpr int kShortSplit = 7;  // log2 of keys
inline constexpr int kMediumSplit = 9;
inline constexpr int kLongSplit = 11;

// Division of non-negative numbers. Most fit 32 bits, whose division takes a GPU a tenth of the
// time, and one thread does this while others wait.
ATTEND_HD inline int64_t FastDivide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
ATTEND_HD inline int64_t CeilDivide(int64_t a, int64_t b) { return FastDivide(a + b - 1, b); }
ATTEND_HD inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// A sequence of k_len keys has splits of 2^SplitShift keys, a multiple of kCostKeys. `rows`: of a
// unit.
ATTEND_HD inline int SplitShift(int64_t k_len, int64_t rows) {
  int shift = k_len <= kShortKeys ? kShortSplit : k_len <= kMediumKeys ? kMediumSplit : kLongSplit;
  if (rows > 16 && k_len <= kMediumKeys) ++shift;
  if (rows > 32 && k_len > kManyRowsKeys) ++shift;
  while ((int64_t{kSplitsMax} << shift) < k_len) ++shift;
  return shift;
}
ATTEND_HD inline int64_t SplitKeys(int64_t k_len, int64_t rows) {
  return int64_t{1} << SplitShift(k_len, rows);
}

// Upper bound of splits over all sequences of up to k_len keys.
inline int64_t SplitsAtMost(int64_t k_len, int64_t rows) {
  int64_t most = 1;
  for (const int64_t keys :
       {int64_t{kShortKeys}, int64_t{kMediumKeys}, int64_t{kManyRowsKeys}, k_len}) {
    const int64_t least = Least(keys, k_len);
    most = std::max(most, CeilDivide(least, SplitKeys(least, rows)));
  }
  return CeilDivide(k_len, SplitKeys(k_len, rows)) * 2 > kSplitsMax ? kSplitsMax : most;
}

// How a sequence is cut; the same for all of its units.
struct SequencePlan {
  Sequence sequence;
  int32_t row_tiles = 0;
  int32_t units = 0;      // KV heads x row_tiles
  int32_t key_begin = 0;  // keys that some row sees
  int32_t key_end = 0;
  int32_t split_shift = 0;
  int32_t first_split = 0;  // the first split of the sequence that has such keys
  int32_t splits = 1;       // from there on; if there are no keys, one empty split
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
    // Both ends of the visible range are monotonic in the row.
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

// The line of splits, cut into a share per block: a split belongs to the share in which it begins.
struct Shares {
  int64_t total = 0;  // cost of all splits
  int64_t each = 1;   // of every share but the last
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

// The same for units of one cost: begins shares at the same places of all units if they grow by up
// to a sixteenth. Blocks of neighbouring chunks then read the same keys at about the same time.
inline Shares AlignShares(int64_t total, int64_t unit_cost, int blocks) {
  Shares shares = CutShares(total, blocks);
  int64_t aligned = CeilDivide(shares.each, unit_cost) * unit_cost;
  if (shares.each < unit_cost) {
    int64_t parts = unit_cost / shares.each;
    while (unit_cost % parts != 0) --parts;
    aligned = unit_cost / parts;
  }
  if (aligned - shares.each <= shares.each / 16) shares.each = aligned;
  return shares;
}

// Division of numbers below 2^31 by one that the host knows, as a multiplication.
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

// K or V of one KV head, dense or paged. Strides are in units of 16 bytes.
struct KeySource {
  const char* data;      // key 0, or page 0
  uint32_t stride;       // between keys
  uint32_t page_stride;  // between pages
};
inline constexpr int kStrideUnit = 16;

// A block's next piece of work: splits [split, split_end) of one unit. In shared memory.
struct Segment {
  const Attention* attention;  // null: none
  KeySource k, v;
  const char* q;                   // the sequence's first row and head
  int64_t q_stride_h, q_stride_l;  // bytes
  const int32_t* pages;            // the sequence's; null: K and V are dense
  int page_shift, page_mask;       // of a key's row in its page; all ones if not paged
  int b, h;                        // KV head
  int group;                       // query heads per KV head
  int row_begin;                   // packed row: query row * group + head within the group
  int rows;                        // packed rows to write
  int key_begin, key_end;          // keys that some row of the unit sees
  int full_begin, full_end;        // keys that every row of it sees
  int columns_k, columns_v;        // actual columns
  int split_shift, first_split, splits, split_cost;
  int split, split_end;  // counted from first_split
  int64_t position;      // of the unit's first split, in the line
  Sequence sequence;
  float scale;
  ScoreCap<float> cap;
  bool has_alibi, has_bits;
  int hidden_begin, hidden_end;  // keys that a mask of bits may hide from some row; see FindHidden
};

// Sets the fields that are the same for all units of a sequence.
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
  segment.cap = CapOf(p);
  segment.has_alibi = p.has_alibi;
  segment.has_bits = HasBits(a);
}

// Sets the segment's rows, up to `tile_rows` from `row_begin` on, and the keys that they see.
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

// Groups of a unit's splits, and the size of one.
ATTEND_HD inline int GroupCount(int splits) { return (splits + kFanIn - 1) / kFanIn; }
ATTEND_HD inline int GroupSize(int splits, int group) {
  return static_cast<int>(Least(kFanIn, splits - group * kFanIn));
}

}  // namespace attend::cuda
