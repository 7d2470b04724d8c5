// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/score_terms.h"

#include <array>
#include <cmath>
#include <numeric>

#include "kernels/contract/limits.h"

namespace attend {

ScoreTerms TermsOf(const Attention& a, const Sequence& s, const RowId& id, int64_t j,
                   const double* q, const double* k) {
  const Problem& p = a.problem;
  ScoreTerms terms;
  if (p.has_bias) {
    const int64_t at = id.b * a.bias.stride_b + id.h * a.bias.stride_h + id.i * a.bias.stride_q + j;
    terms.bias = LoadElementAsDouble(a.bias.data, a.bias.dtype, at);
    if (HasBits(a) && terms.bias < 0) return terms;
  }
  // Several accumulators break the dependency chain of additions.
  constexpr int64_t kSums = 8;
  std::array<double, kSums> dots{};
  std::array<double, kSums> magnitudes{};
  std::array<double, kHeadDimMax> products;
  for (int64_t d = 0; d < p.dim; ++d) {
    products[d] = q[d] * k[d];
  }
  // Whole blocks in a loop of constant length, which compilers vectorise.
  const int64_t whole = p.dim / kSums * kSums;
  for (int64_t d = 0; d < whole; d += kSums) {
    for (int64_t n = 0; n < kSums; ++n) {
      dots[n] += products[d + n];
      magnitudes[n] += std::abs(products[d + n]);
    }
  }
  for (int64_t d = whole; d < p.dim; ++d) {
    dots[d - whole] += products[d];
    magnitudes[d - whole] += std::abs(products[d]);
  }
  terms.dot = std::accumulate(dots.begin(), dots.end(), 0.0);
  terms.magnitude = std::accumulate(magnitudes.begin(), magnitudes.end(), 0.0);
  terms.capped = ExactCap(p).Apply(ExactScale(p) * terms.dot);
  if (p.has_alibi) {
    const double slope = static_cast<double>(a.alibi_slopes[id.b * a.alibi_stride_b + id.h]);
    terms.penalty = slope * std::abs(static_cast<double>(j - id.i - s.offset));
  }
  return terms;
}

}  // namespace attend
