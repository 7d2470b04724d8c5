// SPDX-License-Identifier: Apache-2.0
//
// The GPU's backward pass for keys with a large common part, which multiplies the effect of O's
// rounding on delta. O and LSE are the CPU's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr double kUnit = 0x1p-24;  // fp32's

double At(const void* data, DType dtype, int64_t element) {
  return static_cast<double>(LoadElement(data, dtype, element));
}

// A sequence and head. Makes keys and queries whose common part makes every score about -`size`;
// only their differences contribute to the gradients.
OwnedAttention WithCommonPart(DType dtype, double size, uint64_t seed) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 8, 40, 64, 64, dtype), seed);
  const Attention& a = owned.attention;
  const auto move = [&](void* element, double by) {
    Set(a, element, static_cast<float>(0.3 * static_cast<double>(Get(a, element)) + by));
  };
  const double part = std::sqrt(size * 8) / 8;
  for (int64_t d = 0; d < 64; ++d) {
    for (int64_t i = 0; i < 8; ++i) move(owned.Q(0, 0, i, d), -part);
    for (int64_t j = 0; j < 40; ++j) move(owned.K(0, 0, j, d), part);
  }
  return owned;
}

// Adds a common part to each key and value, `keys` and `values` in every column, and removes from
// queries their component along the keys', so that scores do not change.
void GiveCommonParts(OwnedAttention* owned, double keys, double values) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  const auto add = [&](void* element, double by) {
    Set(a, element, static_cast<float>(static_cast<double>(Get(a, element)) + by));
  };
  for (int64_t j = 0; j < p.len_k; ++j) {
    for (int64_t d = 0; d < p.dim; ++d) add(owned->K(0, 0, j, d), keys);
    for (int64_t d = 0; d < p.dim_v; ++d) add(owned->V(0, 0, j, d), values);
  }
  for (int64_t i = 0; i < p.len_q; ++i) {
    double sum = 0;
    for (int64_t d = 0; d < p.dim; ++d) sum += static_cast<double>(Get(a, owned->Q(0, 0, i, d)));
    for (int64_t d = 0; d < p.dim; ++d) {
      add(owned->Q(0, 0, i, d), -sum / static_cast<double>(p.dim));
    }
  }
}

// dQ and dK in double, of dS as it is and rounded to `factors`.
struct Truth {
  std::vector<double> d_q, d_k, rounded_d_q, rounded_d_k;
};
Truth TruthOf(const Attention& a, const Gradients& g, DType factors) {
  const Problem& p = a.problem;
  Truth truth;
  truth.d_q.resize(static_cast<size_t>(p.len_q * p.dim));
  truth.d_k.resize(static_cast<size_t>(p.len_k * p.dim));
  truth.rounded_d_q = truth.d_q;
  truth.rounded_d_k = truth.d_k;
  for (int64_t i = 0; i < p.len_q; ++i) {
    for (const KeyGradient& key : ReferenceKeyGradients(a, g, {0, 0, i})) {
      uint32_t place = 0;
      StoreElement(&place, factors, 0, static_cast<float>(key.d_dot / p.scale));
      const double rounded = At(&place, factors, 0) * p.scale;
      for (int64_t d = 0; d < p.dim; ++d) {
        const auto in_q = static_cast<size_t>(i * p.dim + d);
        const auto in_k = static_cast<size_t>(key.j * p.dim + d);
        const double of_k = At(a.k.data, p.dtype, key.j * a.k.stride_l + d);
        const double of_q = At(a.q.data, p.dtype, i * a.q.stride_l + d);
        truth.d_q[in_q] += key.d_dot * of_k;
        truth.d_k[in_k] += key.d_dot * of_q;
        truth.rounded_d_q[in_q] += rounded * of_k;
        truth.rounded_d_k[in_k] += rounded * of_q;
      }
    }
  }
  return truth;
}

double Largest(const std::vector<double>& x, const std::vector<double>& y) {
  double most = 0;
  for (size_t n = 0; n < x.size(); ++n) most = std::max(most, std::abs(x[n] - y[n]));
  return most;
}
std::vector<double> Values(const TensorView& got, DType dtype, int64_t dim, size_t count) {
  std::vector<double> values(count);
  for (size_t n = 0; n < count; ++n) {
    const auto at = static_cast<int64_t>(n);
    values[n] = At(got.data, dtype, at / dim * got.stride_l + at % dim);
  }
  return values;
}

double LargestNorm(const ConstTensorView& x, DType dtype, int64_t rows, int64_t dim) {
  double most = 0;
  for (int64_t n = 0; n < rows; ++n) {
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) squares += std::pow(At(x.data, dtype, n * x.stride_l + d), 2);
    most = std::max(most, std::sqrt(squares));
  }
  return most;
}

// Errors of dQ and dK are at most twice those of rounding dS to 16 bits. Kernels that do not round
// it may have as much as cpu_flash: the result's own rounding twice, and the effect on weights of
// rounding scores of `size` in fp32 (score_rounding.h), four times that where one key has most of
// the weight. Where one key has all of it the gradient vanishes, and errors are fp32's of the
// cancelled terms: |scale| |dO| |V| |K|, for dK |Q|.
void ExpectAsWithExactDelta(OwnedAttention* owned, double size, uint64_t seed) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  CpuReference(a);
  for (const Way& way : kWays) {
    OwnedGradients gradients(a, seed);
    gradients.get().d_lse = nullptr;
    const Gradients& g = gradients.get();
    if (!Takes(way, a, g)) continue;
    const Truth truth = TruthOf(a, g, FactorsOf(way, p));
    const Status status = RunBackward(owned, &gradients, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const double scores = 4 * (2 + 4 + 8) * kUnit * size;
    const double cancelled = kUnit * p.scale * LargestNorm(g.d_o, p.dtype, p.len_q, p.dim_v) *
                             LargestNorm(a.v, p.dtype, p.len_k, p.dim_v);
    const auto expect = [&](const char* what, const TensorView& got, double other,
                            const std::vector<double>& want, const std::vector<double>& rounded) {
      const double most = Largest(want, std::vector<double>(want.size()));
      const double allowed = 2 * Largest(rounded, want) +
                             (2 * UnitRoundoff(p.dtype) + scores) * most + cancelled * other;
      EXPECT_LE(Largest(Values(got, p.dtype, p.dim, want.size()), want), allowed)
          << what << ", " << NameOf(way);
    };
    expect("dQ", g.d_q, LargestNorm(a.k, p.dtype, p.len_k, p.dim), truth.d_q, truth.rounded_d_q);
    expect("dK", g.d_k, LargestNorm(a.q, p.dtype, p.len_q, p.dim), truth.d_k, truth.rounded_d_k);
  }
}

TEST(CudaBackwardCommonParts, CommonKeysAtLargeScoresAreWithinBounds) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const double size : {30.0, 300.0, 2500.0, 10000.0}) {
      // fp32 rounds scores more coarsely than fp16
      if (size > 300 && dtype == DType::kFloat16) continue;
      SCOPED_TRACE(std::string(DTypeName(dtype)) + " " + std::to_string(size));
      OwnedAttention owned = WithCommonPart(dtype, size, seed);
      ExpectAsWithExactDelta(&owned, size, seed);
    }
  }
}

// Scores do not show it: rows are classified by the common part of O, keys and values.
TEST(CudaBackwardCommonParts, CommonKeysAndValuesAtOrdinaryScoresAreWithinBounds) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  constexpr std::pair<int64_t, int64_t> kDims[] = {{64, 64},   {96, 80},   {128, 128},
                                                   {192, 128}, {256, 256}, {40, 24}};
  uint64_t n = 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [dim, dim_v] : kDims) {
      for (const double keys : {1.0, 8.0}) {
        for (int kind = 0; kind < 3; ++kind, ++n) {
          if (TestScale() < 1 && n % 5 != seed % 5) continue;
          ProblemSpec spec = MakeSpec(1, 1, 1, 130, 700, dim, dim_v, dtype);
          Problem& p = spec.problem;
          if (kind == 1) p.mask = {Alignment::kBottomRight, -1, 0};
          if (kind == 2) p.mask = {Alignment::kBottomRight, 300, 40};
          if (n % 5 == 1) p.has_alibi = true;
          if (n % 5 == 2) p.has_sinks = true;
          if (n % 5 == 3) p.softcap = 30.0f;
          if (n % 5 == 4) spec = WithDropout(std::move(spec), seed);
          OwnedAttention owned = MakeAttention(spec, seed + n);
          GiveCommonParts(&owned, keys, 2.0);
          SCOPED_TRACE(Describe(spec) + " keys " + std::to_string(keys));
          ExpectAsWithExactDelta(&owned, 8, seed);
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
