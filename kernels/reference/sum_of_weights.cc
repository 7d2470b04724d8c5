// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/sum_of_weights.h"

#include <cmath>

#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/gradient_terms.h"

namespace attend {

SumFault FindSumFault(const Attention& a, const Gradients& g, int64_t b, int64_t kv_head,
                      bool weights_rounded, GradientRows* rows, const StopFlag* stop) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  const auto dim = static_cast<size_t>(p.dim_v);
  const bool rounded = weights_rounded && p.dtype != DType::kFloat32;
  const double step =
      SubnormalStep(p.dtype) + KeptFactor(p) * SubnormalRoundings(p.group() * s.q_len);
  // Errors of the sums over rows and over keys, and of each weight as a factor.
  const double units = SumRoundings(s.k_len) + SumRoundings(s.q_len * p.group()) +
                       (rounded ? UnitRoundoff(p.dtype) : 0);
  const double steps = rounded ? static_cast<double>(s.k_len) * SubnormalStep(p.dtype) : 0;
  RowElements want{}, bound{}, got{}, values;
  for (int64_t n = 0; n < p.group() * s.q_len && !Stopped(stop); ++n) {
    const GradientRow row = rows->Row({b, kv_head * p.group() + n / s.q_len, n % s.q_len});
    const RowWeights& w = row.weights;
    if (w.known && w.inverse_sum == 0) continue;
    if (w.kept < 0) return {};
    for (size_t d = 0; d < dim; ++d) {
      want[d] += w.kept * row.d_o[d];
      bound[d] += (w.kept_error + units * w.kept + steps) * std::abs(row.d_o[d]);
    }
  }
  const ConstTensorView d_v{g.d_v.data, g.d_v.stride_b, g.d_v.stride_h, g.d_v.stride_l};
  for (int64_t j = 0; j < s.k_len; ++j) {
    LoadRow(d_v, p.dtype, p.dim_v, b, kv_head, s.k_row + j, &values);
    for (size_t d = 0; d < dim; ++d) {
      got[d] += values[d];
      bound[d] += UnitRoundoff(p.dtype) * std::abs(values[d]) + step;
    }
  }
  SumFault worst;
  for (size_t d = 0; d < dim && !Stopped(stop); ++d) {
    const double ratio = std::abs(got[d] - want[d]) / bound[d];
    if (!std::isfinite(got[d]) || !std::isfinite(want[d]) || !(ratio > worst.ratio)) continue;
    worst = {ratio, static_cast<int64_t>(d), got[d], want[d]};
  }
  return worst;
}

}  // namespace attend
