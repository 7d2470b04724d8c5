// SPDX-License-Identifier: Apache-2.0
//
// Three passes over a row's keys: the maximum, the sum of weights in eight accumulators, then O
// with weights that are already divided.

#include "kernels/reference/plain_row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/reference/dropout_factor.h"

namespace attend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Round(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      return HalfToFloat(FloatToHalf(value));
    case DType::kBFloat16:
      return BFloat16ToFloat(FloatToBFloat16(value));
    case DType::kFloat32:
    case DType::kFloat64:  // never judged by the plain implementation
    case DType::kBit:
      return value;
  }
  return value;
}

// Scores of query row i and the keys [j, j + kKeysAtOnce), each summed in fp32 from the first
// dimension to the last. Several keys at a time, because a single sum is bound by the latency of
// its additions.
constexpr int64_t kKeysAtOnce = 8;

void PlainDots(const Attention& a, const Sequence& s, const RowId& id, int64_t j, const float* q,
               int64_t count, float* dots) {
  const Problem& p = a.problem;
  std::array<std::array<float, kHeadDimMax>, kKeysAtOnce> rows;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t k = KeyElement(a, a.k, s, id.b, id.h / p.group(), j + n);
    LoadElements(a.k.data, p.dtype, k, p.dim, rows[n].data());
  }
  for (int64_t n = count; n < kKeysAtOnce; ++n) std::fill_n(rows[n].begin(), p.dim, 0.0f);
  // Not in `dots` itself: it might alias q, and would be stored after every addition.
  std::array<float, kKeysAtOnce> sums{};
  for (int64_t d = 0; d < p.dim; ++d) {
    for (int64_t n = 0; n < kKeysAtOnce; ++n) sums[n] += q[d] * rows[n][d];
  }
  std::copy(sums.begin(), sums.end(), dots);
}

// All score terms of problem.h between q.k and the mask.
float PlainScore(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j,
                 float dot) {
  const Problem& p = a.problem;
  float score = CapOf(p).Apply(dot * p.scale);
  if (p.has_bias) {
    const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
    const float bias = LoadElement(a.bias.data, a.bias.dtype, at);
    if (HasBits(a) && bias < 0) return bias;
    score += bias;
  }
  if (p.has_alibi) {
    score -=
        a.alibi_slopes[b * a.alibi_stride_b + h] * std::abs(static_cast<float>(j - i - s.offset));
  }
  return score;
}

// The scores of one query row over its visible keys in order, any number of times: the first keys'
// are cached, later ones are recomputed.
class PlainScores {
 public:
  PlainScores(const Attention& a, const Sequence& s, const RowId& id, const StopFlag* stop)
      : a_(a), s_(s), id_(id), stop_(stop), keys_(VisibleKeys(a.problem.mask, s, id.i)) {
    const Problem& p = a.problem;
    const int64_t q = id.b * a.q.stride_b + id.h * a.q.stride_h + (s.q_row + id.i) * a.q.stride_l;
    LoadElements(a.q.data, p.dtype, q, p.dim, q_.data());
    const int64_t keys = std::max<int64_t>(0, keys_.end - keys_.begin);
    kept_.reserve(static_cast<size_t>(std::min(keys, kKept)));
  }

  // visit(key, score) for every key in order whose score is not -inf, until `stop` is set.
  template <class Visit>
  void ForEach(Visit visit) {
    std::array<float, kKeysAtOnce> scores;
    for (int64_t j = keys_.begin; j < keys_.end && !Stopped(stop_); j += kKeysAtOnce) {
      const int64_t count = std::min(kKeysAtOnce, keys_.end - j);
      const float* at = scores.data();
      if (const int64_t n = j - keys_.begin; n < static_cast<int64_t>(kept_.size())) {
        at = kept_.data() + n;
      } else {
        Compute(j, count, scores.data());
        if (n < kKept) kept_.insert(kept_.end(), scores.begin(), scores.begin() + count);
      }
      for (int64_t n = 0; n < count; ++n) {
        if (at[n] != -kInfinity) visit(j + n, at[n]);
      }
    }
  }

 private:
  static constexpr int64_t kKept = 65536;

  void Compute(int64_t j, int64_t count, float* scores) const {
    PlainDots(a_, s_, id_, j, q_.data(), count, scores);
    for (int64_t n = 0; n < count; ++n) {
      scores[n] = PlainScore(a_, s_, id_.b, id_.h, id_.i, j + n, scores[n]);
    }
  }

  const Attention& a_;
  const Sequence& s_;
  const RowId id_;
  const StopFlag* const stop_;
  const KeyRange keys_;
  std::array<float, kHeadDimMax> q_;
  std::vector<float> kept_;
};

}  // namespace

void PlainRow(const Attention& a, int64_t b, int64_t h, int64_t i, bool weights_rounded, float* o,
              float* lse, const StopFlag* stop) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  std::fill(o, o + p.dim_v, 0.0f);
  *lse = -kInfinity;
  if (i >= s.q_len) return;

  PlainScores scores(a, s, {b, h, i}, stop);
  SoftmaxState<float> state;
  scores.ForEach([&](int64_t, float score) {
    if (!(score <= state.max) && !std::isnan(state.max)) state.max = score;
  });
  const float max = state.max;
  std::array<float, kKeysAtOnce> sums{};
  scores.ForEach([&](int64_t j, float score) { sums[j % kKeysAtOnce] += std::exp(score - max); });
  state.sum = std::accumulate(sums.begin(), sums.end(), 0.0f);
  const bool empty = state.sum == 0;
  float factor = p.has_sinks ? AddSink(state, a.sinks[h]) : 1.0f;
  *lse = LogSumExp(state);
  if (empty) return;
  factor *= InverseSum(state);

  std::array<float, kHeadDimMax> values;
  scores.ForEach([&](int64_t j, float score) {
    // Normalise before accumulating: sums of the largest values would overflow.
    const float exponential = std::exp(score - max);
    float weight = (weights_rounded ? Round(p.dtype, exponential) : exponential) * factor;
    if (p.dropout > 0) {
      const auto kept = static_cast<float>(DropoutFactor(a, {b, h, i}, j));
      if (kept == 0) return;
      weight *= kept;
    }
    const int64_t v = KeyElement(a, a.v, s, b, h / p.group(), j);
    LoadElements(a.v.data, p.dtype, v, p.dim_v, values.data());
    for (int64_t d = 0; d < p.dim_v; ++d) o[d] += weight * values[d];
  });
  for (int64_t d = 0; d < p.dim_v; ++d) o[d] = Round(p.o_dtype(), o[d]);
}

}  // namespace attend
