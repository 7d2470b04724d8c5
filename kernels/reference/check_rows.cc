// SPDX-License-Identifier: Apache-2.0
//
// Every checked element gives a Comparison: kernel, reference and plain value, with the unit and
// the floor of its bound. The bound depends on r, the plain implementation's error in units, which
// is known only after the last row. So Judge keeps, in constant memory, the largest r that any
// element needs in order to pass and the largest r that the plain implementation justifies; the
// check passes if the latter is at least the former.

#include "kernels/reference/check_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/plain_row.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloat32Roundoff = UnitRoundoff(DType::kFloat32);

// Roundings of a weight between score and output, beside those of the score itself: exp (two units
// in good libraries and polynomials), product, sum of weights, its reciprocal, the final product,
// and two for rescaling when the maximum moves.
constexpr double kWeightRoundings = 8;

// Further roundings with dropout: its factor, and the product with it.
constexpr double kDropoutRoundings = 2;

// Loss of a Tensor Core sum P V per key, in fp32 roundoffs of the sum: see the header.
constexpr double kKeyTruncations = 1.0 / 4;

// Upper bound of r for rows other than the one it was seen in. A plain implementation's error stays
// within its unit, except by bad luck.
constexpr double kPlainRatioMax = 2;

// A row counts as wide if the rounding of its weights alone may move O by more than this share of
// sum p|v|.
constexpr double kWideShare = 0x1p-10;

// One output element with its truth. `unit` is the cost of one rounding of each kind. The bound is
// 2 r unit + floor and, in a wide row, no more than the distance to the end of V's range (`side`,
// on the output's side of the reference) plus 2 r edge_unit + edge_floor.
struct Comparison {
  double got = 0;
  double reference = 0;
  double plain = 0;
  double stored = 0;  // share of the plain error that is O's own rounding, which floor covers
  double unit = 0;
  double floor = 0;
  double side = kInfinity;
  double edge_unit = 0;
  double edge_floor = 0;
};

double BoundOf(const Comparison& c, double ratio) {
  const double inside = std::isfinite(c.unit) ? 2 * ratio * c.unit + c.floor : kInfinity;
  return std::min(inside, c.side + 2 * ratio * c.edge_unit + c.edge_floor);
}

// The r at which this error would pass.
double NeededRatio(const Comparison& c, double error) {
  if (std::isinf(error)) return kInfinity;
  const auto needed = [](double over, double unit) {
    return over <= 0 ? 0 : unit > 0 ? over / (2 * unit) : kInfinity;
  };
  const double inside = std::isfinite(c.unit) ? needed(error - c.floor, c.unit) : 0;
  const double beyond =
      std::isfinite(c.side) ? needed(error - c.side - c.edge_floor, c.edge_unit) : 0;
  return error == 0 ? 0 : std::max(inside, beyond);
}

// Half a subnormal step of the dtype, where roundings are not relative to the value, plus fp32's
// for the sums and quotient over `keys`, times dropout's factor. The worst case: it hardly matters.
double SubnormalRounding(const Problem& p, int64_t keys) {
  const double once = p.dtype == DType::kFloat16    ? 0x1p-25
                      : p.dtype == DType::kBFloat16 ? 0x1p-134
                                                    : 0x1p-150;
  const double factor = p.dropout > 0 ? KeptFactor(p) : 1;
  return once + factor * (1 + static_cast<double>(keys)) * 0x1p-150;
}

// Values from here on round to Inf.
double Overflow(DType dtype) {
  return dtype == DType::kFloat16 ? 65520 : dtype == DType::kBFloat16 ? 0x1.ffp127 : 0x1.ffffffp127;
}

bool SameSpecial(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

// Facts about one row that decide how its outputs are judged.
struct RowFacts {
  RowRounding rounding;
  bool wide = false;
  std::array<double, kHeadDimMax> low;  // range of the visible keys' V, if wide
  std::array<double, kHeadDimMax> high;
};

// Whether the result is right although it or the reference is NaN or Inf: neither may be finite
// alone.
bool SpecialIsRight(const Comparison& c, const RowRounding& row, bool lse) {
  if (SameSpecial(c.got, c.reference)) return true;
  if (!std::isfinite(c.plain) && SameSpecial(c.got, c.plain)) return true;
  if (std::isfinite(c.reference)) {
    if (std::isnan(c.got)) return row.may_overflow;
    return lse && (c.got > 0 ? row.may_overflow : row.all_vanish);
  }
  // The key that makes the reference special may be invisible to fp32.
  return row.may_overflow || row.some_vanish;
}

// The error; infinity if there is a NaN or Inf where none belongs, or the reverse. Inf is right for
// a value that rounds to it, even if only because of the allowed error.
double ErrorOf(const Comparison& c, const RowRounding& row, DType dtype, bool lse) {
  if (std::isfinite(c.got) && std::isfinite(c.reference)) return std::abs(c.got - c.reference);
  if (SpecialIsRight(c, row, lse)) return 0;
  if (std::isnan(c.got) || !std::isfinite(c.reference)) return kInfinity;
  const double short_by = Overflow(dtype) - std::copysign(c.reference, c.got * c.reference);
  if (short_by <= 0) return 0;
  return !lse && short_by <= BoundOf(c, kPlainRatioMax) ? short_by : kInfinity;
}

std::string Place(const RowId& id, int64_t d) {
  std::string text = d < 0 ? "lse of " : "o[" + std::to_string(d) + "] of ";
  return text + "sequence " + std::to_string(id.b) + ", head " + std::to_string(id.h) + ", row " +
         std::to_string(id.i);
}

// Statistics of one kind of output (O or LSE) over the checked rows, in constant memory: r is known
// only at the end, so it keeps the r that the values would need.
class Judge {
 public:
  // `least_ratio`: lower bound of r, for a plain implementation that was luckier.
  Judge(DType dtype, bool lse, double least_ratio)
      : dtype_(dtype), lse_(lse), ratio_(least_ratio) {}

  // Adds one row's outputs, in order.
  void Add(std::span<const Comparison> outputs, const RowFacts& row, const RowId& id) {
    double own = 0;
    for (const Comparison& c : outputs) {
      const double error = std::max(0.0, std::abs(c.plain - c.reference) - c.stored);
      if (c.unit > 0 && std::isfinite(c.unit) && std::isfinite(error)) {
        own = std::max(own, error / c.unit);
      }
    }
    if (!row.wide) ratio_ = std::max(ratio_, std::min(own, kPlainRatioMax));
    for (size_t d = 0; d < outputs.size(); ++d) {
      AddOne(outputs[d], row.rounding, own, id, lse_ ? -1 : static_cast<int64_t>(d));
    }
  }

  bool ok() const { return needed_ <= ratio_; }
  double max_error() const { return max_error_; }
  double mean_error() const { return finite_ > 0 ? error_sum_ / finite_ : 0; }
  double bound() const { return seen_ ? BoundOf(at_max_, std::max(ratio_, own_at_max_)) : 0; }

  std::string Fault() const {
    char numbers[160];
    std::snprintf(numbers, sizeof(numbers), " is %.9g, reference %.9g, error %.3g, bound %.3g",
                  worst_.got, worst_.reference, worst_error_,
                  BoundOf(worst_, std::max(ratio_, own_at_worst_)));
    return Place(worst_row_, worst_dim_) + numbers;
  }

 private:
  void AddOne(const Comparison& c, const RowRounding& row, double own, const RowId& id, int64_t d) {
    const double error = ErrorOf(c, row, lse_ ? DType::kFloat32 : dtype_, lse_);
    if (std::isfinite(error)) {
      error_sum_ += error;
      ++finite_;
    }
    if (error > max_error_ || !seen_) {
      max_error_ = error;
      at_max_ = c;
      own_at_max_ = own;
    }
    seen_ = true;
    const double needed = NeededRatio(c, error);
    if (needed <= std::max(own, needed_)) return;
    needed_ = needed;
    worst_ = c;
    worst_error_ = error;
    own_at_worst_ = own;
    worst_row_ = id;
    worst_dim_ = d;
  }

  const DType dtype_;
  const bool lse_;
  double ratio_;       // r of the header, over all rows
  double needed_ = 0;  // the r at which every value passes
  double max_error_ = 0;
  double error_sum_ = 0;
  double finite_ = 0;
  bool seen_ = false;
  double own_at_max_ = 0;
  double worst_error_ = 0;
  double own_at_worst_ = 0;
  Comparison at_max_;
  Comparison worst_;
  RowId worst_row_;
  int64_t worst_dim_ = 0;
};

// Finds the range of a mean of the visible keys' finite V, per column. It includes 0 if there are
// sinks (a key of value 0), dropped weights, or keys that fp32 may lose.
void FindRange(const Attention& a, const RowId& id, const StopFlag* stop, RowFacts* row) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, id.b);
  const RowRounding& r = row->rounding;
  const bool zero = p.has_sinks || p.dropout > 0 || r.may_overflow || r.some_vanish;
  row->low.fill(zero ? 0 : kInfinity);
  row->high.fill(zero ? 0 : -kInfinity);
  std::array<float, kHeadDimMax> v;
  const KeyRange keys = VisibleKeys(p.mask, s, id.i);
  for (int64_t j = keys.begin; j < keys.end && !Stopped(stop); ++j) {
    const int64_t bias =
        id.b * a.bias.stride_b + id.h * a.bias.stride_h + id.i * a.bias.stride_q + j;
    if (p.has_bias &&
        LoadElement(a.bias.data, a.bias.dtype, bias) == -std::numeric_limits<float>::infinity()) {
      continue;
    }
    const int64_t at = KeyElement(a, a.v, s, id.b, id.h / p.group(), j);
    LoadElements(a.v.data, p.dtype, at, p.dim_v, v.data());
    for (int64_t d = 0; d < p.dim_v; ++d) {
      if (!std::isfinite(v[d])) continue;
      row->low[d] = std::min(row->low[d], static_cast<double>(v[d]));
      row->high[d] = std::max(row->high[d], static_cast<double>(v[d]));
    }
  }
  for (int64_t d = 0; p.dropout > 0 && d < p.dim_v; ++d) {
    row->low[d] *= KeptFactor(p);
    row->high[d] *= KeptFactor(p);
  }
}

// Sets `side`, the distance from `reference` to the end of V's range on the side where `got` is.
void LimitToRange(double low, double high, double dtype_unit, double subnormal, Comparison* c) {
  if (!(low <= high)) return;
  const double most = std::max(std::abs(low), std::abs(high));
  c->side = std::max(0.0, c->got > c->reference ? high - c->reference : c->reference - low);
  c->edge_unit = (dtype_unit + kWeightRoundings * kFloat32Roundoff) * most + subnormal;
  c->edge_floor = c->edge_unit;
}

// The reference and the plain result of one row.
struct RowTruth {
  std::array<double, kHeadDimMax> o;
  double lse = 0;
  std::array<float, kHeadDimMax> plain;
  float plain_lse = 0;
};

void CompareO(const Attention& a, const RowId& id, const RowTruth& truth, const RowFacts& row,
              std::span<Comparison> out) {
  const Problem& p = a.problem;
  const RowRounding& r = row.rounding;
  const DType weights = r.weights_rounded ? p.dtype : DType::kFloat32;
  const double dtype_unit = UnitRoundoff(weights);
  const double o_unit = UnitRoundoff(p.o_dtype());
  const double sum_unit = std::sqrt(static_cast<double>(r.keys)) / 4 * kFloat32Roundoff;
  const double weight_unit =
      (kWeightRoundings + (p.dropout > 0 ? kDropoutRoundings : 0)) * kFloat32Roundoff + sum_unit;
  const double truncations =
      weights == DType::kFloat32 ? 0 : kKeyTruncations * static_cast<double>(r.counting_keys);
  const int64_t base =
      id.b * a.o.stride_b + id.h * a.o.stride_h + (SequenceOf(a, id.b).q_row + id.i) * a.o.stride_l;
  for (int64_t d = 0; d < p.dim_v; ++d) {
    Comparison& c = out[d];
    c = {.got = static_cast<double>(LoadElement(a.o.data, p.o_dtype(), base + d)),
         .reference = truth.o[d],
         .plain = static_cast<double>(truth.plain[d])};
    if (!std::isfinite(c.reference)) {
      if (row.wide && std::isfinite(c.got)) LimitToRange(row.low[d], row.high[d], 0, 0, &c);
      continue;
    }
    const double w = r.o[d] + (std::isfinite(r.moved[d]) ? r.moved[d] : 0);
    const double subnormal = w > 0 || r.lost[d] > 0 ? SubnormalRounding(p, r.keys) : 0;
    const double lost32 = weights == DType::kFloat16 ? 0 : r.lost[d];
    c.stored = o_unit * std::abs(c.reference);
    c.unit = (dtype_unit + weight_unit + sum_unit) * w + r.lost[d] + r.moved[d] + subnormal;
    c.floor = c.stored + (weight_unit + truncations * kFloat32Roundoff) * w + lost32 + r.moved[d] +
              subnormal;
    if (row.wide) {
      LimitToRange(row.low[d], row.high[d], std::max(dtype_unit, o_unit), subnormal, &c);
    }
  }
}

Comparison CompareLse(const Attention& a, const RowId& id, const RowTruth& truth,
                      const RowFacts& row) {
  const RowRounding& r = row.rounding;
  const int64_t q_row = SequenceOf(a, id.b).q_row + id.i;
  Comparison c{
      .got = static_cast<double>(a.lse[id.b * a.lse_stride_b + id.h * a.lse_stride_h + q_row]),
      .reference = truth.lse,
      .plain = static_cast<double>(truth.plain_lse)};
  if (!std::isfinite(c.reference)) return c;
  const double moved = c.got > c.reference ? r.lse_up : r.lse_down;
  const double sum_unit = std::sqrt(static_cast<double>(r.keys)) / 4;
  const double roundings = r.keys > 0 ? kWeightRoundings + sum_unit : 0;
  const double most = std::abs(c.reference) + (std::isfinite(moved) ? moved : 0);
  c.floor = kFloat32Roundoff * (roundings + most) + moved;
  c.unit = c.floor + kFloat32Roundoff * sum_unit;
  // Where scores may overflow, all that is known of a finite LSE is that it is an fp32 number.
  c.side =
      std::max(0.0, Overflow(DType::kFloat32) + (c.got > c.reference ? -c.reference : c.reference));
  return c;
}

// True if the scores' rounding alone may move the row's O far from the reference.
bool CheckRow(const Attention& a, const RowId& id, bool weights_rounded, const StopFlag* stop,
              Judge* o, Judge* lse) {
  const Problem& p = a.problem;
  RowTruth truth;
  RowFacts row;
  row.rounding.weights_rounded = weights_rounded;
  ReferenceRow(a, id.b, id.h, id.i, truth.o.data(), &truth.lse, &row.rounding, stop);
  PlainRow(a, id.b, id.h, id.i, weights_rounded, truth.plain.data(), &truth.plain_lse, stop);
  if (Stopped(stop)) return false;
  const RowRounding& r = row.rounding;
  row.wide = r.may_overflow || r.all_vanish || r.some_vanish;
  for (int64_t d = 0; d < p.dim_v; ++d) {
    row.wide = row.wide || (std::isfinite(truth.o[d]) && r.moved[d] > kWideShare * r.o[d]);
  }
  if (row.wide) FindRange(a, id, stop, &row);
  std::array<Comparison, kHeadDimMax> comparisons;
  const std::span<Comparison> outputs(comparisons.data(), static_cast<size_t>(p.dim_v));
  CompareO(a, id, truth, row, outputs);
  o->Add(outputs, row, id);
  if (p.return_lse) {
    const Comparison c = CompareLse(a, id, truth, row);
    lse->Add({&c, 1}, row, id);
  }
  return row.wide;
}

// Checks rows one by one.
class RowsCheck {
 public:
  // Weights rounded to 16 bits, as in every Tensor Core kernel, may cost one unit (twice the least
  // r); with few visible keys the plain implementation can be far from that by chance.
  RowsCheck(const Attention& a, bool weights_rounded)
      : a_(a),
        weights_rounded_(weights_rounded),
        o_(a.problem.o_dtype(), false,
           a.problem.dtype == DType::kFloat32 || !weights_rounded ? 0.0 : 0.5),
        lse_(a.problem.dtype, true, 0.0) {}

  void Add(const RowId& id, const StopFlag* stop = nullptr) {
    ++rows_;
    if (CheckRow(a_, id, weights_rounded_, stop, &o_, &lse_)) ++wide_;
  }

  RowsReport Report() const {
    RowsReport report;
    report.ok = o_.ok() && lse_.ok();
    report.rows_checked = rows_;
    report.rows_total = CountRows(a_);
    report.rows_wide = wide_;
    report.max_abs_error = o_.max_error();
    report.mean_abs_error = o_.mean_error();
    report.bound = o_.bound();
    report.max_lse_error = lse_.max_error();
    report.lse_bound = lse_.bound();
    if (!report.ok) report.detail = o_.ok() ? lse_.Fault() : o_.Fault();
    return report;
  }

 private:
  const Attention& a_;
  const bool weights_rounded_;
  int64_t rows_ = 0;
  int64_t wide_ = 0;
  Judge o_;
  Judge lse_;
};

}  // namespace

int64_t CountRows(const Attention& a) {
  int64_t rows = 0;
  for (int64_t b = 0; b < a.problem.batch; ++b) rows += SequenceOf(a, b).q_rows;
  return rows * a.problem.heads_q;
}

RowsReport CheckRows(const Attention& a, std::span<const RowId> rows, const StopFlag* stop,
                     bool weights_rounded) {
  RowsCheck check(a, weights_rounded);
  for (const RowId& id : rows) {
    if (Stopped(stop)) break;
    check.Add(id, stop);
  }
  return check.Report();
}

RowsReport CheckAllRows(const Attention& a, bool weights_rounded) {
  RowsCheck check(a, weights_rounded);
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const int64_t q_rows = SequenceOf(a, b).q_rows;
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < q_rows; ++i) check.Add({b, h, i});
    }
  }
  return check.Report();
}

void PoisonOutput(const Attention& a, const StopFlag* stop) {
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = s.q_row; i < s.q_row + s.q_rows && !Stopped(stop); ++i) {
        const int64_t base = b * a.o.stride_b + h * a.o.stride_h + i * a.o.stride_l;
        for (int64_t d = 0; d < p.dim_v; ++d) {
          StoreElement(a.o.data, p.o_dtype(), base + d, std::numeric_limits<float>::quiet_NaN());
        }
        if (p.return_lse) {
          a.lse[b * a.lse_stride_b + h * a.lse_stride_h + i] =
              std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
  }
}

}  // namespace attend
