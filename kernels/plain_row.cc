// SPDX-License-Identifier: Apache-2.0

#include "kernels/plain_row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/limits.h"

namespace attend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Rounded(DType dtype, float value) {
  float stored = 0;
  StoreElement(&stored, dtype, 0, value);
  return LoadElement(&stored, dtype, 0);
}

float PlainScore(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i,
                 int64_t j) {
  const Problem& p = a.problem;
  const int64_t q = b * a.q.stride_b + h * a.q.stride_h + (s.q_row + i) * a.q.stride_l;
  const int64_t k =
      b * a.k.stride_b + (h / p.group()) * a.k.stride_h + (s.k_row + j) * a.k.stride_l;
  float score = 0;
  for (int64_t d = 0; d < p.dim; ++d) {
    score += LoadElement(a.q.data, p.dtype, q + d) * LoadElement(a.k.data, p.dtype, k + d);
  }
  score *= p.scale;
  if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
  if (p.has_bias) {
    const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
    score += LoadElement(a.bias.data, a.bias.dtype, at);
  }
  if (p.has_alibi) {
    score -= a.alibi_slopes[b * a.alibi_stride_b + h] * std::abs(static_cast<float>(j - i - s.offset));
  }
  return score;
}

}  // namespace

void PlainRow(const Attention& a, int64_t b, int64_t h, int64_t i, float* o, float* lse) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  std::fill(o, o + p.dim_v, 0.0f);
  *lse = -kInfinity;
  if (i >= s.q_len) return;

  const KeyRange keys = VisibleKeys(p.mask, s, i);
  std::vector<float> scores;
  float max = p.has_sinks ? a.sinks[h] : -kInfinity;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    scores.push_back(PlainScore(a, s, b, h, i, j));
    if (!(scores.back() <= max) && !std::isnan(max)) max = scores.back();
  }
  if (max == -kInfinity) return;

  float sum = p.has_sinks ? std::exp(a.sinks[h] - max) : 0.0f;
  for (const float score : scores) {
    if (score != -kInfinity) sum += std::exp(score - max);
  }
  *lse = max + std::log(sum);
  const int64_t v = b * a.v.stride_b + (h / p.group()) * a.v.stride_h;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const float score = scores[static_cast<size_t>(j - keys.begin)];
    if (score == -kInfinity) continue;
    const float weight = Rounded(p.dtype, std::exp(score - max) / sum);
    const int64_t row = v + (s.k_row + j) * a.v.stride_l;
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weight * LoadElement(a.v.data, p.dtype, row + d);
  }
  for (int64_t d = 0; d < p.dim_v; ++d) o[d] = Rounded(p.dtype, o[d]);
}

}  // namespace attend
