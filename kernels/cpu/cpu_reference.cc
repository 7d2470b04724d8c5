// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/cpu_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/softmax_state.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The value of `dtype` nearest to a double. Going through float would round twice, so the float is
// rounded to odd: its last bit then remembers that something was cut off.
void StoreRounded(void* data, DType dtype, int64_t index, double value) {
  float narrow = static_cast<float>(value);
  if (dtype != DType::kFloat32 && std::isfinite(narrow) && static_cast<double>(narrow) != value) {
    if ((std::bit_cast<uint32_t>(narrow) & 1u) == 0) {
      constexpr float kUp = std::numeric_limits<float>::infinity();
      narrow = std::nextafter(narrow, static_cast<double>(narrow) < value ? kUp : -kUp);
    }
  }
  StoreElement(data, dtype, index, narrow);
}

struct Score {
  double value;
  double magnitude;
};

// Everything of problem.h between q.k and the mask, for query row i and key j.
Score ScoreOf(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j,
              const float* q, const float* k) {
  const Problem& p = a.problem;
  // Several sums at once: one would wait for itself with every addition.
  constexpr int64_t kSums = 8;
  std::array<double, kSums> dots{};
  std::array<double, kSums> magnitudes{};
  std::array<double, kHeadDimMax> products;
  for (int64_t d = 0; d < p.dim; ++d) {
    products[d] = static_cast<double>(q[d]) * static_cast<double>(k[d]);
  }
  // Whole blocks in a loop of known length, which compilers make vectors of.
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
  const double dot = std::accumulate(dots.begin(), dots.end(), 0.0);
  const double magnitude = std::accumulate(magnitudes.begin(), magnitudes.end(), 0.0);
  const double scale = static_cast<double>(p.scale);
  Score score{scale * dot, std::abs(scale) * magnitude};
  if (p.softcap > 0) {
    const double cap = static_cast<double>(p.softcap);
    score.value = cap * std::tanh(score.value / cap);
  }
  if (p.has_bias) {
    const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
    const double bias = static_cast<double>(LoadElement(a.bias.data, a.bias.dtype, at));
    score.value += bias;
    score.magnitude += std::abs(bias);
  }
  if (p.has_alibi) {
    const double slope = static_cast<double>(a.alibi_slopes[b * a.alibi_stride_b + h]);
    const double penalty = slope * std::abs(static_cast<double>(j - i - s.offset));
    score.value -= penalty;
    score.magnitude += std::abs(penalty);
  }
  return score;
}

// The scores of one query row over the keys it sees, first key first.
struct RowScores {
  KeyRange keys{0, 0};
  std::vector<double> values;
  double max = -kInfinity;  // NaN if any is
  double magnitude = 0;
};

RowScores ScoresOf(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i) {
  const Problem& p = a.problem;
  RowScores row;
  if (i >= s.q_len) return row;
  row.keys = VisibleKeys(p.mask, s, i);
  if (row.keys.begin >= row.keys.end) return row;
  std::array<float, kHeadDimMax> q;
  std::array<float, kHeadDimMax> k;
  const int64_t q_base = b * a.q.stride_b + h * a.q.stride_h;
  const int64_t k_base = b * a.k.stride_b + (h / p.group()) * a.k.stride_h;
  LoadElements(a.q.data, p.dtype, q_base + (s.q_row + i) * a.q.stride_l, p.dim, q.data());
  row.values.reserve(static_cast<size_t>(row.keys.end - row.keys.begin));
  for (int64_t j = row.keys.begin; j < row.keys.end; ++j) {
    LoadElements(a.k.data, p.dtype, k_base + (s.k_row + j) * a.k.stride_l, p.dim, k.data());
    const Score score = ScoreOf(a, s, b, h, i, j, q.data(), k.data());
    row.values.push_back(score.value);
    if (score.value == -kInfinity) continue;
    row.magnitude = std::max(row.magnitude, score.magnitude);
    if (!(score.value <= row.max) && !std::isnan(row.max)) row.max = score.value;
  }
  return row;
}

}  // namespace

void ReferenceRow(const Attention& a, int64_t b, int64_t h, int64_t i, double* o, double* lse,
                  RowMagnitudes* magnitudes) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  const RowScores row = ScoresOf(a, s, b, h, i);
  if (magnitudes != nullptr) *magnitudes = RowMagnitudes{.score = row.magnitude};
  std::fill(o, o + p.dim_v, 0.0);

  SoftmaxState<double> state;
  state.max = row.max;
  std::array<float, kHeadDimMax> v;
  const int64_t v_base = b * a.v.stride_b + (h / p.group()) * a.v.stride_h;
  for (size_t n = 0; n < row.values.size(); ++n) {
    if (row.values[n] == -kInfinity) continue;
    // Never 0, however small: a visible key's Inf is Inf times something.
    const double exponential = ScaledExp(row.values[n], state.max);
    const double weight = exponential == 0 ? std::numeric_limits<double>::min() : exponential;
    const int64_t j = row.keys.begin + static_cast<int64_t>(n);
    LoadElements(a.v.data, p.dtype, v_base + (s.k_row + j) * a.v.stride_l, p.dim_v, v.data());
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weight * static_cast<double>(v[d]);
    if (magnitudes != nullptr) {
      for (int64_t d = 0; d < p.dim_v; ++d) {
        const double magnitude = std::abs(static_cast<double>(v[d]));
        magnitudes->o[d] += weight * magnitude;
        magnitudes->v[d] += magnitude;
      }
    }
    state.sum += weight;
  }
  const bool empty = state.sum == 0;
  double rescale = 1;
  if (p.has_sinks && i < s.q_len) rescale = AddSink(state, static_cast<double>(a.sinks[h]));
  *lse = LogSumExp(state);
  if (empty) return;
  rescale *= InverseSum(state);
  for (int64_t d = 0; d < p.dim_v; ++d) {
    o[d] *= rescale;
    if (magnitudes != nullptr) magnitudes->o[d] *= rescale;
  }
}

void StoreReferenceRow(const Attention& a, int64_t b, int64_t h, int64_t i) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  std::array<double, kHeadDimMax> o;
  double lse = 0;
  ReferenceRow(a, b, h, i, o.data(), &lse);
  const int64_t base = b * a.o.stride_b + h * a.o.stride_h + (s.q_row + i) * a.o.stride_l;
  for (int64_t d = 0; d < p.dim_v; ++d) StoreRounded(a.o.data, p.dtype, base + d, o[d]);
  if (p.return_lse) {
    a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i] = static_cast<float>(lse);
  }
}

void CpuReference(const Attention& a) {
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    const int64_t rows = SequenceOf(a, b).q_rows;
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < rows; ++i) StoreReferenceRow(a, b, h, i);
    }
  }
}

}  // namespace attend
