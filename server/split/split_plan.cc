// SPDX-License-Identifier: Apache-2.0

#include "server/split/split_plan.h"

#include <algorithm>
#include <cmath>
#include <compare>
#include <initializer_list>
#include <limits>

#include "kernels/contract/attention_slice.h"

namespace attend {
namespace {

struct Dim {
  int64_t size = 0;
  int64_t stride = 0;
};

// Whether the dimensions, outermost first, have no gaps around runs of `inner` elements.
bool Contiguous(std::initializer_list<Dim> dims, int64_t inner) {
  int64_t expected = inner;
  for (auto dim = std::rbegin(dims); dim != std::rend(dims); ++dim) {
    if (dim->size != 1 && dim->stride != expected) return false;
    expected *= dim->size;
  }
  return true;
}

enum class Order { kNone, kHeadsOutside, kRowsOutside, kPacked };

// The order of O's dimensions in memory. LSE's innermost dimension is always rows.
Order OrderOf(const Attention& a) {
  const Problem& p = a.problem;
  const Dim batch{p.batch, a.o.stride_b};
  const Dim heads{p.heads_q, a.o.stride_h};
  const Dim rows{p.packed ? p.total_q : p.len_q, a.o.stride_l};
  if (p.return_lse) {
    const Dim lse_batch{p.packed ? 1 : p.batch, a.lse_stride_b};
    if (!Contiguous({lse_batch, {p.heads_q, a.lse_stride_h}}, rows.size)) return Order::kNone;
  }
  if (p.packed) return Contiguous({rows, heads}, p.dim_v) ? Order::kPacked : Order::kNone;
  if (Contiguous({batch, heads, rows}, p.dim_v)) return Order::kHeadsOutside;
  if (Contiguous({batch, rows, heads}, p.dim_v)) return Order::kRowsOutside;
  return Order::kNone;
}

// A position in the order of memory: a sequence, a head of it, a row of that head. If rows are
// outside heads, all heads count as one.
struct Position {
  int64_t b = 0;
  int64_t h = 0;
  int64_t r = 0;

  auto operator<=>(const Position&) const = default;
};

// The problem as a line of rows, from the first to the last, that cuts divide. Cost is the number
// of visible pairs.
class Line {
 public:
  Line(const Attention& whole, int64_t rows_multiple);

  double total() const { return before_.back(); }
  Position end() const { return {whole_.problem.batch, 0, 0}; }
  double CostBefore(const Position& at) const;
  Position Cut(double target, double tolerance) const;
  // Appends the slices of [begin, end).
  void Cover(Position begin, const Position& end, int shard, std::vector<QuerySlice>* slices) const;

 private:
  Position Normal(Position at) const;
  double RowsCost(int64_t rows) const;  // of the first rows of any head
  int64_t RowsBelow(double cost) const;
  QuerySlice NextSlice(const Position& begin, const Position& end) const;

  const Attention& whole_;
  const int64_t len_q_;
  const int64_t heads_;  // in the order of memory
  const int64_t group_;
  const int64_t multiple_;  // of rows; 0: they are not cut
  std::vector<double> per_head_;
  std::vector<double> before_;  // each sequence, and the end
};

Line::Line(const Attention& whole, int64_t rows_multiple)
    : whole_(whole),
      len_q_(whole.problem.len_q),
      heads_(OrderOf(whole) == Order::kHeadsOutside ? whole.problem.heads_q : 1),
      group_(OrderOf(whole) == Order::kHeadsOutside ? whole.problem.group() : 1),
      multiple_(RowsCanBeSliced(whole) ? rows_multiple : 0),
      before_{0.0} {
  Attention sequence = whole;
  sequence.problem.batch = 1;
  for (int64_t b = 0; b < whole.problem.batch; ++b) {
    if (whole.q_lengths != nullptr) sequence.q_lengths = whole.q_lengths + b;
    if (whole.kv_lengths != nullptr) sequence.kv_lengths = whole.kv_lengths + b;
    if (whole.q_offsets != nullptr) sequence.q_offsets = whole.q_offsets + b;
    if (whole.kv_offsets != nullptr) sequence.kv_offsets = whole.kv_offsets + b;
    per_head_.push_back(VisiblePairs(sequence));
    before_.push_back(before_.back() + static_cast<double>(heads_) * per_head_.back());
  }
}

Position Line::Normal(Position at) const {
  if (at.r >= len_q_) at = {at.b, at.h + 1, 0};
  if (at.h >= heads_) at = {at.b + 1, 0, 0};
  return at;
}

double Line::RowsCost(int64_t rows) const {
  if (rows == 0) return 0;
  const Result<Attention> part = TakeSlice(whole_, {0, 1, 0, whole_.problem.heads_kv, 0, rows});
  return VisiblePairs(*part);
}

// The largest number of rows, a multiple of multiple_, that costs at most `cost`.
int64_t Line::RowsBelow(double cost) const {
  int64_t low = 0;
  int64_t high = len_q_ / multiple_ + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (RowsCost(middle * multiple_) <= cost ? low : high) = middle;
  }
  return low * multiple_;
}

double Line::CostBefore(const Position& at) const {
  if (at == end()) return total();
  return before_[at.b] + static_cast<double>(at.h) * per_head_[at.b] + RowsCost(at.r);
}

Position Line::Cut(double target, double tolerance) const {
  const auto above = std::upper_bound(before_.begin(), before_.end(), target);
  const int64_t b = std::clamp<int64_t>(above - before_.begin() - 1, 0, whole_.problem.batch - 1);
  Position best;
  double best_distance = std::numeric_limits<double>::infinity();
  const auto near_enough = [&](const Position& low, const Position& high) {
    for (const Position& at : {low, Normal(high)}) {
      const double distance = std::abs(CostBefore(at) - target);
      if (distance < best_distance) {
        best = at;
        best_distance = distance;
      }
    }
    return best_distance <= tolerance;
  };
  if (near_enough({b, 0, 0}, {b + 1, 0, 0}) || per_head_[b] <= 0) return best;
  const double rest = target - before_[b];
  const int64_t h = std::clamp<int64_t>(static_cast<int64_t>(rest / per_head_[b]), 0, heads_ - 1);
  const int64_t kv = h / group_ * group_;
  if (near_enough({b, kv, 0}, {b, kv + group_, 0})) return best;
  if (near_enough({b, h, 0}, {b, h + 1, 0}) || multiple_ == 0) return best;
  const int64_t r = RowsBelow(rest - static_cast<double>(h) * per_head_[b]);
  near_enough(Normal({b, h, r}), {b, h, r + multiple_});
  return best;
}

// The longest slice from `begin` on that is one attention.
QuerySlice Line::NextSlice(const Position& begin, const Position& end) const {
  const Problem& p = whole_.problem;
  QuerySlice slice{0, begin.b, begin.b + 1, 0, p.heads_q, 0, len_q_};
  const bool same_sequence = end.b == begin.b;
  if (begin.r > 0 || (same_sequence && end.h == begin.h)) {
    slice.rows_begin = begin.r;
    if (same_sequence && end.h == begin.h) slice.rows_end = end.r;
    if (heads_ > 1) {
      slice.heads_begin = begin.h;
      slice.heads_end = begin.h + 1;
    }
  } else if (begin.h > 0 || same_sequence) {
    slice.heads_begin = begin.h;
    slice.heads_end = same_sequence ? end.h : heads_;
    const int64_t next_kv = (begin.h / group_ + 1) * group_;
    if (begin.h % group_ != 0) {
      slice.heads_end = std::min(slice.heads_end, next_kv);
    } else if (slice.heads_end >= next_kv) {
      slice.heads_end = slice.heads_end / group_ * group_;
    }
  } else {
    slice.batch_end = end.b;
  }
  return slice;
}

void Line::Cover(Position begin, const Position& end, int shard,
                 std::vector<QuerySlice>* slices) const {
  while (begin < end) {
    QuerySlice slice = NextSlice(begin, end);
    slice.shard = shard;
    slices->push_back(slice);
    if (slice.batch_end > begin.b + 1) {
      begin = {slice.batch_end, 0, 0};
    } else if (heads_ == 1) {
      begin = Normal({begin.b, 0, slice.rows_end});
    } else if (slice.heads_end > begin.h + 1) {
      begin = Normal({begin.b, slice.heads_end, 0});
    } else {
      begin = Normal({begin.b, begin.h, slice.rows_end});
    }
  }
}

}  // namespace

std::vector<QuerySlice> PlanSplit(const Attention& whole, int shards, int64_t rows_multiple) {
  std::vector<QuerySlice> slices;
  if (shards < 2 || OrderOf(whole) == Order::kNone) return slices;
  const Line line(whole, rows_multiple);
  if (!(line.total() > 0)) return slices;
  const double shard_cost = line.total() / shards;
  std::vector<Position> cuts = {Position()};
  std::vector<double> costs = {0.0};
  for (int n = 1; n < shards; ++n) {
    const Position cut = line.Cut(n * shard_cost, thresholds::kSplitTolerance * shard_cost);
    const double cost = line.CostBefore(cut);
    if (cut <= cuts.back() || cost <= costs.back() || cost >= line.total()) continue;
    cuts.push_back(cut);
    costs.push_back(cost);
  }
  cuts.push_back(line.end());
  costs.push_back(line.total());
  for (size_t n = 0; n + 1 < cuts.size(); ++n) {
    if (costs[n + 1] - costs[n] > thresholds::kLargestShardMax * line.total()) return {};
    line.Cover(cuts[n], cuts[n + 1], static_cast<int>(n), &slices);
  }
  return slices;
}

Result<Attention> TakeQuerySlice(const Attention& whole, const QuerySlice& slice) {
  const int64_t group = whole.problem.group();
  if (slice.heads_begin % group == 0 && slice.heads_end % group == 0) {
    return TakeSlice(whole, {slice.batch_begin, slice.batch_end, slice.heads_begin / group,
                             slice.heads_end / group, slice.rows_begin, slice.rows_end});
  }
  // Some query heads of one KV head: each as if it had its own KV head, all of them the same one.
  const int64_t kv = slice.heads_begin / group;
  Result<Attention> shared =
      TakeSlice(whole, {slice.batch_begin, slice.batch_end, kv, kv + 1, 0, whole.problem.len_q});
  if (!shared.ok()) return shared;
  shared->problem.heads_kv = group;
  shared->k.stride_h = shared->v.stride_h = 0;
  Result<Attention> part =
      TakeSlice(*shared, {0, shared->problem.batch, slice.heads_begin - kv * group,
                          slice.heads_end - kv * group, slice.rows_begin, slice.rows_end});
  if (!part.ok()) return part;
  part->problem.heads_kv = 1;
  part->k.stride_h = whole.k.stride_h;
  part->v.stride_h = whole.v.stride_h;
  return part;
}

}  // namespace attend
