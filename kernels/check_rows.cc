// SPDX-License-Identifier: Apache-2.0

#include "kernels/check_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "kernels/cpu/cpu_reference.h"
#include "kernels/plain_row.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloat32Roundoff = UnitRoundoff(DType::kFloat32);

// Roundings of a weight on its way from score to output beside those of the score itself: exp (two
// units in good libraries and polynomials), product, sum of weights, its reciprocal, the final
// product, and two for the rescaling when the maximum moves.
constexpr double kWeightRoundings = 8;

// An output beside the truth about it. `unit` is what one rounding of each kind costs it; its bound
// is 2 * (largest plain error / unit seen anywhere) * unit + floor.
struct Comparison {
  double got;
  double reference;
  double plain;
  double unit;
  double floor;
};

// Half a step between the dtype's subnormals, where roundings are not relative to the value.
double SubnormalRounding(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-150;
}

// Weights below this may count as 0: kernels need not keep subnormal numbers of fp32.
constexpr double kVanishingWeight = 0x1p-126;
double VanishingWeight(DType dtype) {
  return dtype == DType::kFloat16 ? SubnormalRounding(dtype) : kVanishingWeight;
}

bool SameSpecial(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

// The error, or infinity if the value is not finite where it should be (or the reverse).
double ErrorOf(const Comparison& c) {
  if (std::isfinite(c.got) && std::isfinite(c.reference)) return std::abs(c.got - c.reference);
  if (SameSpecial(c.got, c.reference)) return 0;
  return !std::isfinite(c.plain) && SameSpecial(c.got, c.plain) ? 0 : kInfinity;
}

// The plain error in units that would let this error pass.
double NeededRatio(const Comparison& c, double error) {
  if (std::isinf(error)) return kInfinity;
  if (error == 0 || error <= c.floor) return 0;
  return c.unit > 0 ? (error - c.floor) / (2 * c.unit) : kInfinity;
}

std::string Place(const RowId& id, int64_t d) {
  std::string text = d < 0 ? "lse of " : "o[" + std::to_string(d) + "] of ";
  return text + "sequence " + std::to_string(id.b) + ", head " + std::to_string(id.h) + ", row " +
         std::to_string(id.i);
}

// Everything about one kind of output (O or LSE) over the rows checked, in constant memory: the
// bound is known only at the end, so what is kept is the ratio that each value would need.
class Judge {
 public:
  // `least_ratio`: what r is taken for even where the plain implementation was luckier.
  explicit Judge(double least_ratio) : plain_ratio_(least_ratio) {}

  void Add(const Comparison& c, const RowId& id, int64_t d) {
    const double plain_error = std::abs(c.plain - c.reference);
    if (c.unit > 0 && std::isfinite(plain_error)) {
      plain_ratio_ = std::max(plain_ratio_, plain_error / c.unit);
    }
    const double error = ErrorOf(c);
    if (std::isfinite(error)) {
      error_sum_ += error;
      ++finite_;
    }
    if (error > max_error_ || !seen_) {
      max_error_ = error;
      at_max_ = c;
    }
    if (const double needed = NeededRatio(c, error); needed > needed_ratio_ || !seen_) {
      needed_ratio_ = needed;
      worst_ = c;
      worst_row_ = id;
      worst_dim_ = d;
    }
    seen_ = true;
  }

  bool ok() const { return needed_ratio_ <= plain_ratio_; }
  double max_error() const { return max_error_; }
  double mean_error() const { return finite_ > 0 ? error_sum_ / finite_ : 0; }
  double bound() const { return seen_ ? BoundOf(at_max_) : 0; }

  std::string Fault() const {
    char numbers[160];
    std::snprintf(numbers, sizeof(numbers), " is %.9g, reference %.9g, error %.3g, bound %.3g",
                  worst_.got, worst_.reference, ErrorOf(worst_), BoundOf(worst_));
    return Place(worst_row_, worst_dim_) + numbers;
  }

 private:
  double BoundOf(const Comparison& c) const { return 2 * plain_ratio_ * c.unit + c.floor; }

  double plain_ratio_;       // r of the header
  double needed_ratio_ = 0;  // the r at which every value would pass
  double max_error_ = 0;
  double error_sum_ = 0;
  double finite_ = 0;
  bool seen_ = false;
  Comparison at_max_{};
  Comparison worst_{};
  RowId worst_row_;
  int64_t worst_dim_ = 0;
};

void CheckRow(const Attention& a, const RowId& id, int o_roundings, Judge* o, Judge* lse) {
  const Problem& p = a.problem;
  std::array<double, kHeadDimMax> reference;
  std::array<float, kHeadDimMax> plain;
  double reference_lse = 0;
  float plain_lse = 0;
  RowMagnitudes magnitudes;
  ReferenceRow(a, id.b, id.h, id.i, reference.data(), &reference_lse, &magnitudes);
  PlainRow(a, id.b, id.h, id.i, plain.data(), &plain_lse);

  const double fp32_unit =
      kFloat32Roundoff *
      (kWeightRoundings + (2 + std::sqrt(static_cast<double>(p.dim)) / 2) * magnitudes.score);
  const double dtype_unit = UnitRoundoff(p.dtype);
  const double lse_unit =
      std::isfinite(reference_lse) ? fp32_unit + kFloat32Roundoff * std::abs(reference_lse) : 0;
  const double merge_unit =
      (o_roundings - 1) * (dtype_unit + fp32_unit + kFloat32Roundoff + lse_unit);
  const int64_t q_row = SequenceOf(a, id.b).q_row + id.i;
  const int64_t base = id.b * a.o.stride_b + id.h * a.o.stride_h + q_row * a.o.stride_l;
  for (int64_t d = 0; d < p.dim_v; ++d) {
    const double w = magnitudes.o[d];
    const double all = magnitudes.v[d];
    const double fp32_part = fp32_unit * w + kVanishingWeight * all;
    const double subnormal = all > 0 ? SubnormalRounding(p.dtype) : 0;
    o->Add({.got = static_cast<double>(LoadElement(a.o.data, p.dtype, base + d)),
            .reference = reference[d],
            .plain = static_cast<double>(plain[d]),
            .unit = dtype_unit * w + VanishingWeight(p.dtype) * all + fp32_part + subnormal,
            .floor = dtype_unit * std::abs(reference[d]) + merge_unit * w + fp32_part +
                     o_roundings * subnormal},
           id, d);
  }
  if (!p.return_lse) return;
  const float got = a.lse[id.b * a.lse_stride_b + id.h * a.lse_stride_h + q_row];
  lse->Add({.got = static_cast<double>(got),
            .reference = reference_lse,
            .plain = static_cast<double>(plain_lse),
            .unit = lse_unit,
            .floor = o_roundings * lse_unit},
           id, -1);
}

}  // namespace

int64_t CountRows(const Attention& a) {
  int64_t rows = 0;
  for (int64_t b = 0; b < a.problem.batch; ++b) rows += SequenceOf(a, b).q_rows;
  return rows * a.problem.heads_q;
}

RowsReport CheckRows(const Attention& a, std::span<const RowId> rows, int o_roundings) {
  // Weights rounded to 16 bits, as every Tensor Core kernel's are, may cost one unit (twice this
  // ratio); where few keys are visible the plain implementation can be far from that by chance.
  const bool half = a.problem.dtype != DType::kFloat32;
  Judge o(half ? 0.5 : 0.0);
  Judge lse(0.0);
  for (const RowId& id : rows) CheckRow(a, id, o_roundings, &o, &lse);
  RowsReport report;
  report.ok = o.ok() && lse.ok();
  report.rows_checked = static_cast<int64_t>(rows.size());
  report.rows_total = CountRows(a);
  report.max_abs_error = o.max_error();
  report.mean_abs_error = o.mean_error();
  report.bound = o.bound();
  report.max_lse_error = lse.max_error();
  report.lse_bound = lse.bound();
  if (!report.ok) report.detail = o.ok() ? lse.Fault() : o.Fault();
  return report;
}

RowsReport CheckAllRows(const Attention& a, int o_roundings) {
  std::vector<RowId> rows;
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const int64_t q_rows = SequenceOf(a, b).q_rows;
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < q_rows; ++i) rows.push_back({b, h, i});
    }
  }
  return CheckRows(a, rows, o_roundings);
}

void PoisonOutput(const Attention& a) {
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = s.q_row; i < s.q_row + s.q_rows; ++i) {
        const int64_t base = b * a.o.stride_b + h * a.o.stride_h + i * a.o.stride_l;
        for (int64_t d = 0; d < p.dim_v; ++d) {
          StoreElement(a.o.data, p.dtype, base + d, std::numeric_limits<float>::quiet_NaN());
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
