// SPDX-License-Identifier: Apache-2.0
//
// Chooses the rows that a check at bounded cost recomputes (SampleRows of check_rows.h): first the
// rows that one pass over the output finds suspicious, then a stratified sample of the others.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/dropout_factor.h"

namespace attend {
namespace {

// Rounding slack of a weighted mean, relative to the largest |v|. It only decides which rows are
// checked first.
constexpr float kRangeSlack = 1e-5f;

// True for Inf and NaN. Bits are OR-ed in integers and tested once per row: a branch per value
// would prevent vectorisation.
uint32_t NotFinite(float value) {
  return static_cast<uint32_t>(!(std::abs(value) <= std::numeric_limits<float>::max()));
}

// Range of each column of V (joined with 0) over one sequence and KV head.
struct ColumnRanges {
  std::array<float, kHeadDimMax> low{};
  std::array<float, kHeadDimMax> high{};
  bool finite = true;
};

ColumnRanges RangesOf(const Attention& a, const Sequence& s, int64_t b, int64_t h_kv,
                      const StopFlag* stop) {
  const Problem& p = a.problem;
  ColumnRanges ranges;
  std::array<float, kHeadDimMax> values;
  uint32_t bad = a.v.data == nullptr;
  const int64_t rows = a.v.data == nullptr ? 0 : s.k_len;
  for (int64_t j = 0; j < rows && !Stopped(stop); ++j) {
    LoadElements(a.v.data, p.dtype, KeyElement(a, a.v, s, b, h_kv, j), p.dim_v, values.data());
    for (int64_t d = 0; d < p.dim_v; ++d) {
      bad |= NotFinite(values[d]);
      ranges.low[d] = std::min(ranges.low[d], values[d]);
      ranges.high[d] = std::max(ranges.high[d], values[d]);
    }
  }
  ranges.finite = bad == 0;
  if (p.dropout > 0) {
    const auto kept = static_cast<float>(KeptFactor(p));
    for (float& low : ranges.low) low *= kept;
    for (float& high : ranges.high) high *= kept;
  }
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
  LoadElements(a.o.data, p.o_dtype(), base, p.dim_v, values.data());
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

// A set of up to `limit` rows: suspicious ones first, then the ends of a sequence, then a sample.
// Stores only the rows themselves.
class RowList {
 public:
  explicit RowList(int64_t limit) : limit_(static_cast<size_t>(limit)) {}

  bool full() const { return rows_.size() >= limit_; }

  // Call in ascending order, before the other two.
  void AddSuspicious(const RowId& id) {
    rows_.push_back(id);
    suspicious_ = rows_.size();
  }
  void AddEnd(const RowId& id) {
    if (full() || Has(id)) return;
    rows_.push_back(id);
    ends_ = rows_.size();
  }
  // The caller never draws the same row twice.
  void Draw(const RowId& id) {
    if (!full() && !Has(id)) rows_.push_back(id);
  }

  int64_t room() const { return static_cast<int64_t>(limit_ - std::min(limit_, rows_.size())); }
  std::vector<RowId> Take() { return std::move(rows_); }

 private:
  // Whether the row is among the suspicious ones and the ends.
  bool Has(const RowId& id) const {
    const auto suspicious = rows_.begin() + static_cast<ptrdiff_t>(suspicious_);
    const auto ends = rows_.begin() + static_cast<ptrdiff_t>(std::max(ends_, suspicious_));
    return std::binary_search(rows_.begin(), suspicious, id) ||
           std::find(suspicious, ends, id) != ends;
  }

  const size_t limit_;
  size_t suspicious_ = 0;  // rows_[0, suspicious_) are suspicious
  size_t ends_ = 0;        // rows_[suspicious_, ends_) are ends
  std::vector<RowId> rows_;
};

void AddSuspicious(const Attention& a, const StopFlag* stop, RowList* rows) {
  const Problem& p = a.problem;
  ColumnRanges ranges;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q && s.q_rows > 0; ++h) {
      if (h % p.group() == 0) ranges = RangesOf(a, s, b, h / p.group(), stop);
      for (int64_t i = 0; i < s.q_rows; ++i) {
        if (rows->full() || Stopped(stop)) return;
        const RowId id{b, h, i};
        if (Suspicious(a, ranges, id, s.q_row + i)) rows->AddSuspicious(id);
      }
    }
  }
}

// Numbers all rows by sequence, head and row, without storing them.
class Numbered {
 public:
  explicit Numbered(const Attention& a) : a_(a) {}

  int64_t total() const { return Before(a_.problem.batch); }

  RowId Row(int64_t n) const {
    // Binary search for the last sequence that begins at or before n; empty sequences begin where
    // they end.
    int64_t b = 0;
    int64_t end = a_.problem.batch;
    while (end - b > 1) {
      const int64_t middle = b + (end - b) / 2;
      (Before(middle) <= n ? b : end) = middle;
    }
    const int64_t rows = SequenceOf(a_, b).q_rows;
    const int64_t within = n - Before(b);
    return {b, within / rows, within % rows};
  }

 private:
  // Rows of the sequences before b.
  int64_t Before(int64_t b) const {
    const Problem& p = a_.problem;
    return p.heads_q * (p.packed ? a_.q_offsets[b] - a_.q_offsets[0] : b * p.len_q);
  }

  const Attention& a_;
};

// Cost in multiply-adds of the other parts of a check: once per row, per column, and per (row, key)
// pair (two exponentials etc., tanh, dropout's bits).
constexpr double kRowWork = 1000;
constexpr double kColumnWork = 16;
constexpr double kPairWork = 64;
constexpr double kTanhWork = 48;
constexpr double kDropoutWork = 24;

}  // namespace

double CheckWork(const Problem& p) {
  const double dim = static_cast<double>(p.dim);
  const double dim_v = static_cast<double>(p.dim_v);
  double pair = dim + dim_v + kPairWork;
  if (CapOf(p).on()) pair += kTanhWork;
  if (p.dropout > 0) pair += kDropoutWork;
  if (p.len_k > kKeptScores) pair += 2 * dim;  // most scores are computed at least twice
  return kRowWork + kColumnWork * dim_v + static_cast<double>(p.len_k) * pair;
}

std::vector<RowId> SampleRows(const Attention& a, uint64_t seed, double work_budget,
                              const StopFlag* stop) {
  const Problem& p = a.problem;
  const int64_t total = CountRows(a);
  if (total == 0) return {};
  const int64_t most = std::min(total, kSampledRowsMax);
  const int64_t limit =
      static_cast<int64_t>(std::clamp(work_budget / CheckWork(p), 1.0, static_cast<double>(most)));
  RowList rows(limit);
  if (limit == total) {
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t q_rows = SequenceOf(a, b).q_rows;
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < q_rows; ++i) rows.Draw({b, h, i});
      }
    }
    return rows.Take();
  }
  AddSuspicious(a, stop, &rows);

  const Numbered all(a);
  std::mt19937_64 engine(seed);
  const auto uniform = [&engine](int64_t begin, int64_t end) {
    return std::uniform_int_distribution<int64_t>(begin, end - 1)(engine);
  };
  const RowId some = all.Row(uniform(0, total));
  rows.AddEnd({some.b, some.h, SequenceOf(a, some.b).q_rows - 1});
  rows.AddEnd({some.b, some.h, 0});
  // One row from each of as many equal shares as there is room for.
  const int64_t shares = rows.room();
  const double share = static_cast<double>(total) / static_cast<double>(shares);
  for (int64_t n = 0; n < shares; ++n) {
    const auto begin = static_cast<int64_t>(static_cast<double>(n) * share);
    const auto end = static_cast<int64_t>(static_cast<double>(n + 1) * share);
    rows.Draw(all.Row(uniform(begin, std::max(begin + 1, end))));
  }
  return rows.Take();
}

}  // namespace attend
