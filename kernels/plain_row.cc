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

// Each to `dtype` and back.
void Round(DType dtype, int64_t count, float* values) {
  switch (dtype) {
    case DType::kFloat16:
      for (int64_t n = 0; n < count; ++n) values[n] = HalfToFloat(FloatToHalf(values[n]));
      return;
    case DType::kBFloat16:
      for (int64_t n = 0; n < count; ++n) values[n] = BFloat16ToFloat(FloatToBFloat16(values[n]));
      return;
    case DType::kFloat32:
      return;
  }
}

// The scores of query row i and the keys [begin, begin + kKeysAtOnce) of `keys`, each summed in
// fp32 from the first dimension to the last. Several keys at once: one sum alone would wait for
// itself with every addition.
constexpr int64_t kKeysAtOnce = 8;

void PlainDots(const Attention& a, int64_t k, const float* q, int64_t count, float* dots) {
  const Problem& p = a.problem;
  std::array<std::array<float, kHeadDimMax>, kKeysAtOnce> rows;
  for (int64_t n = 0; n < count; ++n) {
    LoadElements(a.k.data, p.dtype, k + n * a.k.stride_l, p.dim, rows[n].data());
  }
  for (int64_t n = count; n < kKeysAtOnce; ++n) std::fill_n(rows[n].begin(), p.dim, 0.0f);
  // Not in `dots` itself: that might be where q is, and would be stored with every addition.
  std::array<float, kKeysAtOnce> sums{};
  for (int64_t d = 0; d < p.dim; ++d) {
    for (int64_t n = 0; n < kKeysAtOnce; ++n) sums[n] += q[d] * rows[n][d];
  }
  std::copy(sums.begin(), sums.end(), dots);
}

// Everything of problem.h between q.k and the mask.
float PlainScore(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j,
                 float dot) {
  const Problem& p = a.problem;
  float score = dot * p.scale;
  if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
  if (p.has_bias) {
    const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
    score += LoadElement(a.bias.data, a.bias.dtype, at);
  }
  if (p.has_alibi) {
    score -=
        a.alibi_slopes[b * a.alibi_stride_b + h] * std::abs(static_cast<float>(j - i - s.offset));
  }
  return score;
}

std::vector<float> PlainScores(const Attention& a, const Sequence& s, int64_t b, int64_t h,
                               int64_t i, const KeyRange& keys) {
  const Problem& p = a.problem;
  std::array<float, kHeadDimMax> q;
  LoadElements(a.q.data, p.dtype,
               b * a.q.stride_b + h * a.q.stride_h + (s.q_row + i) * a.q.stride_l, p.dim, q.data());
  const int64_t k = b * a.k.stride_b + (h / p.group()) * a.k.stride_h + s.k_row * a.k.stride_l;
  std::vector<float> scores;
  scores.reserve(static_cast<size_t>(std::max<int64_t>(0, keys.end - keys.begin)));
  std::array<float, kKeysAtOnce> dots;
  for (int64_t j = keys.begin; j < keys.end; j += kKeysAtOnce) {
    const int64_t count = std::min(kKeysAtOnce, keys.end - j);
    PlainDots(a, k + j * a.k.stride_l, q.data(), count, dots.data());
    for (int64_t n = 0; n < count; ++n) {
      scores.push_back(PlainScore(a, s, b, h, i, j + n, dots[n]));
    }
  }
  return scores;
}

}  // namespace

void PlainRow(const Attention& a, int64_t b, int64_t h, int64_t i, float* o, float* lse) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  std::fill(o, o + p.dim_v, 0.0f);
  *lse = -kInfinity;
  if (i >= s.q_len) return;

  const KeyRange keys = VisibleKeys(p.mask, s, i);
  const std::vector<float> scores = PlainScores(a, s, b, h, i, keys);
  float max = p.has_sinks ? a.sinks[h] : -kInfinity;
  for (const float score : scores) {
    if (!(score <= max) && !std::isnan(max)) max = score;
  }
  if (max == -kInfinity) return;

  float sum = p.has_sinks ? std::exp(a.sinks[h] - max) : 0.0f;
  std::vector<float> weights(scores.size());
  for (size_t n = 0; n < scores.size(); ++n) {
    if (scores[n] == -kInfinity) continue;
    weights[n] = std::exp(scores[n] - max);
    sum += weights[n];
  }
  *lse = max + std::log(sum);
  for (float& weight : weights) weight /= sum;
  Round(p.dtype, static_cast<int64_t>(weights.size()), weights.data());
  const int64_t v = b * a.v.stride_b + (h / p.group()) * a.v.stride_h;
  std::array<float, kHeadDimMax> values;
  for (size_t n = 0; n < scores.size(); ++n) {
    if (scores[n] == -kInfinity) continue;
    const int64_t row = v + (s.k_row + keys.begin + static_cast<int64_t>(n)) * a.v.stride_l;
    LoadElements(a.v.data, p.dtype, row, p.dim_v, values.data());
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weights[n] * values[d];
  }
  Round(p.dtype, p.dim_v, o);
}

}  // namespace attend
