// SPDX-License-Identifier: Apache-2.0
//
// A query row's softmax as its gradients need it, in double, with bounds on the fp32 error of each
// quantity. check_gradients.h has the formulas, and says when a row is computed whole and when the
// given O and LSE have to do. Host memory; calling thread.

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

// Error of a sum of `terms` products in fp32, relative to the sum of their magnitudes.
double SumRoundings(int64_t terms);
// Further error from subnormal products, which is absolute.
double SubnormalRoundings(int64_t terms);

// Error of a share of a sum whose logarithm is off by `log_error`: at most the distance to the
// further of 0 and 1, plus its own rounding.
double ShareError(double share, double log_error, double log_share);

// A sum of products, and the sum of their magnitudes.
struct Products {
  double sum = 0;
  double magnitude = 0;
};
Products Multiply(const RowElements& x, const RowElements& y, int64_t dim);

void LoadRow(const ConstTensorView& view, DType dtype, int64_t dim, int64_t b, int64_t h,
             int64_t row, RowElements* out);

struct RowWeights {
  bool known = true;       // false: nothing is known about the weights or `less`
  bool given = false;      // derived from the given O and LSE
  double shift = 0;        // P = exp(score - shift) / sum
  double inverse_sum = 0;  // 0: no key has a weight
  double log_error = 0;    // e_LSE
  double log_units = 0;    // units of roundoff per |x|, for x = score - LSE
  double less = 0;         // delta - dLSE
  double less_error = 0;   // by rounding alone, without subnormals
  double less_moved = 0;   // by errors of the weights
  double less_size = 0;    // magnitude of delta and dLSE if nothing cancelled
  double sink = 0;         // the sink's share
  double sink_error = 0;
  double kept = 0;  // sum of P times dropout's factor; < 0: unknown
  double kept_error = 0;
};

// A query row.
struct GradientRow {
  RowId id;
  Sequence sequence;
  RowElements q, d_o;
  RowWeights weights;
};

// The rows of one backward pass. Caches results; not thread-safe.
class GradientRows {
 public:
  // Both must outlive this. `work_budget`, in multiply-adds, is for whole rows.
  GradientRows(const Attention& attention, const Gradients& gradients, double work_budget,
               const StopFlag* stop);

  // Computed whole if all rows are, if `whole` is set, or if the given LSE leaves too much open and
  // the budget allows it.
  GradientRow Row(const RowId& id, bool whole = false);

  // Cost of one (row, key) pair, in multiply-adds.
  double PairWork() const;

 private:
  RowWeights Whole(const GradientRow& row, const RowElements& o, double d_lse) const;
  RowWeights AsGiven(const GradientRow& row, const RowElements& o, double d_lse);
  double LargestKey(const GradientRow& row);
  double LargestPenalty(const GradientRow& row) const;

  const Attention& a_;
  const Gradients& g_;
  const StopFlag* const stop_;
  double budget_;
  bool all_whole_;
  std::unordered_map<int64_t, RowWeights> whole_;  // by row number
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> norms_;
};

}  // namespace attend
