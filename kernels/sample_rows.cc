// SPDX-License-Identifier: Apache-2.0
//
// Chooses the rows that a check at bounded cost recomputes (SampleRows of check_rows.h): first what
// one pass over the output finds suspicious, then a sample spread over sequences, heads and tiles.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <tuple>

#include "kernels/check_rows.h"
#include "kernels/limits.h"

namespace attend {
namespace {

// Query rows that kernels compute together; a fault rarely hits less than a tile.
constexpr int64_t kTileRows = 64;

// What rounding may add to a weighted mean, relative to the largest |v|; only decides which rows
// are looked at first.
constexpr float kRangeSlack = 1e-5f;

// Inf and NaN are not below it. Bits are collected in integers, one test for a row: a branch for
// each value would keep compilers from making vectors of them.
uint32_t NotFinite(float value) {
  return static_cast<uint32_t>(!(std::abs(value) <= std::numeric_limits<float>::max()));
}

// The values that a column of V (joined with 0) spans over one sequence and KV head.
struct ColumnRanges {
  std::array<float, kHeadDimMax> low{};
  std::array<float, kHeadDimMax> high{};
  bool finite = true;
};

ColumnRanges RangesOf(const Attention& a, const Sequence& s, int64_t b, int64_t h_kv) {
  const Problem& p = a.problem;
  ColumnRanges ranges;
  const int64_t base = b * a.v.stride_b + h_kv * a.v.stride_h;
  std::array<float, kHeadDimMax> values;
  uint32_t bad = 0;
  for (int64_t j = 0; j < s.k_len; ++j) {
    LoadElements(a.v.data, p.dtype, base + (s.k_row + j) * a.v.stride_l, p.dim_v, values.data());
    for (int64_t d = 0; d < p.dim_v; ++d) {
      bad |= NotFinite(values[d]);
      ranges.low[d] = std::min(ranges.low[d], values[d]);
      ranges.high[d] = std::max(ranges.high[d], values[d]);
    }
  }
  ranges.finite = bad == 0;
  const float slack = kRangeSlack + 2 * static_cast<float>(UnitRoundoff(p.dtype));
  for (int64_t d = 0; d < p.dim_v; ++d) {
    const float widen = slack * std::max(-ranges.low[d], ranges.high[d]);
    ranges.low[d] -= widen;
    ranges.high[d] += widen;
  }
  return ranges;
}

bool Suspicious(const Attention& a, const ColumnRanges& ranges, const RowId& id, int64_t q_row) {
  const Problem& p = a.problem;
  const int64_t base = id.b * a.o.stride_b + id.h * a.o.stride_h + q_row * a.o.stride_l;
  std::array<float, kHeadDimMax> values;
  LoadElements(a.o.data, p.dtype, base, p.dim_v, values.data());
  uint32_t bad = 0;
  uint32_t outside = 0;
  for (int64_t d = 0; d < p.dim_v; ++d) {
    bad |= NotFinite(values[d]);
    outside |= static_cast<uint32_t>(values[d] < ranges.low[d]) |
               static_cast<uint32_t>(values[d] > ranges.high[d]);
  }
  if (bad != 0 || (ranges.finite && outside != 0)) return true;
  return p.return_lse && std::isnan(a.lse[id.b * a.lse_stride_b + id.h * a.lse_stride_h + q_row]);
}

// Rows to check, each once, up to a limit, in the order they were added.
class RowSet {
 public:
  explicit RowSet(int64_t limit) : limit_(limit) {}

  bool full() const { return static_cast<int64_t>(rows_.size()) >= limit_; }
  void Add(const RowId& id) {
    if (!full() && seen_.insert({id.b, id.h, id.i}).second) rows_.push_back(id);
  }
  std::vector<RowId> Take() { return std::move(rows_); }

 private:
  int64_t limit_;
  std::set<std::tuple<int64_t, int64_t, int64_t>> seen_;
  std::vector<RowId> rows_;
};

void AddSuspicious(const Attention& a, RowSet* rows) {
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h_kv = 0; h_kv < p.heads_kv && s.q_rows > 0; ++h_kv) {
      const ColumnRanges ranges = RangesOf(a, s, b, h_kv);
      for (int64_t h = h_kv * p.group(); h < (h_kv + 1) * p.group(); ++h) {
        for (int64_t i = 0; i < s.q_rows; ++i) {
          if (rows->full()) return;
          const RowId id{b, h, i};
          if (Suspicious(a, ranges, id, s.q_row + i)) rows->Add(id);
        }
      }
    }
  }
}

// All (sequence, head, tile) triples, numbered; finds the n-th without listing them.
class Tiles {
 public:
  explicit Tiles(const Attention& a) : heads_(a.problem.heads_q) {
    for (int64_t b = 0; b < a.problem.batch; ++b) {
      rows_.push_back(SequenceOf(a, b).q_rows);
      total_ += (rows_.back() + kTileRows - 1) / kTileRows * heads_;
      ends_.push_back(total_);
    }
  }

  int64_t total() const { return total_; }

  // A random row of tile n.
  template <class Engine>
  RowId Draw(int64_t n, Engine* engine) const {
    const auto b = std::upper_bound(ends_.begin(), ends_.end(), n) - ends_.begin();
    const int64_t per_head = (rows_[b] + kTileRows - 1) / kTileRows;
    const int64_t within = n - (b == 0 ? 0 : ends_[b - 1]);
    const int64_t first = within % per_head * kTileRows;
    const int64_t last = std::min(first + kTileRows, rows_[b]) - 1;
    return {b, within / per_head, std::uniform_int_distribution<int64_t>(first, last)(*engine)};
  }

  // The first and last row of the sequence and head that tile n belongs to.
  std::pair<RowId, RowId> Ends(int64_t n) const {
    const auto b = std::upper_bound(ends_.begin(), ends_.end(), n) - ends_.begin();
    const int64_t per_head = (rows_[b] + kTileRows - 1) / kTileRows;
    const int64_t h = (n - (b == 0 ? 0 : ends_[b - 1])) / per_head;
    return {{b, h, 0}, {b, h, rows_[b] - 1}};
  }

 private:
  int64_t heads_;
  int64_t total_ = 0;
  std::vector<int64_t> rows_;
  std::vector<int64_t> ends_;  // cumulative tile counts
};

}  // namespace

std::vector<RowId> SampleRows(const Attention& a, uint64_t seed, double work_budget) {
  const Problem& p = a.problem;
  const int64_t total = CountRows(a);
  if (total == 0) return {};
  const double row_work =
      std::max(1.0, static_cast<double>(p.len_k) * static_cast<double>(p.dim + p.dim_v));
  const double affordable = std::clamp(work_budget / row_work, 1.0, static_cast<double>(total));
  const int64_t limit = static_cast<int64_t>(affordable);
  RowSet rows(limit);
  if (limit == total) {
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t q_rows = SequenceOf(a, b).q_rows;
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < q_rows; ++i) rows.Add({b, h, i});
      }
    }
    return rows.Take();
  }
  AddSuspicious(a, &rows);

  const Tiles tiles(a);
  std::mt19937_64 engine(seed);
  const auto uniform = [&engine](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(engine);
  };
  const auto [first, last] = tiles.Ends(uniform(tiles.total()));
  rows.Add(last);
  rows.Add(first);
  // Every tile equally often, in equal steps from a random start; a row drawn twice is drawn anew.
  const double step = static_cast<double>(tiles.total()) / static_cast<double>(limit);
  double at = static_cast<double>(uniform(tiles.total()));
  for (int64_t attempt = 0; !rows.full() && attempt < 4 * limit; ++attempt, at += step) {
    rows.Add(tiles.Draw(static_cast<int64_t>(at) % tiles.total(), &engine));
  }
  return rows.Take();
}

}  // namespace attend
