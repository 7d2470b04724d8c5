// SPDX-License-Identifier: Apache-2.0
//
// A query row's softmax as its gradients need it, in double, with how far off a pass in fp32 may be
// in each of its numbers. check_gradients.h has the formulas and says when a row is computed whole
// and when the O and LSE that came with it have to do. Host memory; calling thread.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

using RowElements = std::array<double, kHeadDimMax>;

// The error of a sum of so many products in fp32, relative to the sum of their magnitudes.
double SumRoundings(int64_t terms);
// And beside that, as the roundings of subnormal numbers are not relative to them.
double SubnormalRoundings(int64_t terms);

// The error of a share of a sum whose logarithm is off by `log_error`: no more than reaches 0 or 1,
// beside its own rounding.
double ShareError(double share, double log_error, double log_share);

// A sum of products, and that of their magnitudes.
struct Products {
  double sum = 0;
  double magnitude = 0;
};
Products Multiply(const RowElements& x, const RowElements& y, int64_t dim);

void LoadRow(const ConstTensorView& view, DType dtype, int64_t dim, int64_t b, int64_t h,
             int64_t row, RowElements* out);

struct RowWeights {
  bool known = true;       // false: nothing can be said of the weights, nor of `less`
  bool given = false;      // by the O and LSE that came
  double shift = 0;        // P = exp(score - shift) / sum
  double inverse_sum = 0;  // 0: no key has a weight
  double log_error = 0;    // e_LSE
  double log_units = 0;    // roundings of x, in fp32's
  double less = 0;         // delta - dLSE
  double less_error = 0;   // by rounding alone, but for subnormal numbers'
  double less_moved = 0;   // and because weights are off
  double less_size = 0;    // what delta and dLSE would be if nothing cancelled
  double sink = 0;         // the sink's share
  double sink_error = 0;
  double kept = 0;  // the sum of P times dropout's factor; < 0: unknown
  double kept_error = 0;
};

// A query row.
struct GradientRow {
  RowId id;
  Sequence sequence;
  RowElements q, d_o;
  RowWeights weights;
};

// The rows of one backward pass. Not thread-safe: remembers what it has found out.
class GradientRows {
 public:
  // Both must stay. `work_budget`, in multiply-adds, is for whole rows.
  GradientRows(const Attention& attention, const Gradients& gradients, double work_budget,
               const StopFlag* stop);

  // Computed whole if all rows are, if `whole` is set, or if nothing less says enough and the
  // budget is not spent.
  GradientRow Row(const RowId& id, bool whole = false);

  // The work of a pair of a row and a key, in multiply-adds.
  double PairWork() const;

 private:
  RowWeights Whole(const GradientRow& row, const RowElements& o, double d_lse) const;
  RowWeights AsGiven(const GradientRow& row, const RowElements& o, double d_lse);
  double LargestKey(const GradientRow& row);

  const Attention& a_;
  const Gradients& g_;
  const StopFlag* const stop_;
  double budget_;
  bool all_whole_;
  std::unordered_map<int64_t, RowWeights> whole_;  // by row of O's
  // The largest |k| of some neighbouring keys that bits do not remove for every row, by sequence
  // and query head, if known.
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> norms_;
};

}  // namespace attend
