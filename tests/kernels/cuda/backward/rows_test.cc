// SPDX-License-Identifier: Apache-2.0
//
// The GPU's backward pass for rows with a large LSE, and with NaN and Inf. O and LSE are the CPU's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
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

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr double kUnit = 0x1p-24;  // fp32's
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

double At(const void* data, DType dtype, int64_t element) {
  return static_cast<double>(LoadElement(data, dtype, element));
}

// Over the keys, a row's weights in dV sum to 1: dV adds up to dO. Each weight is off by its own
// rounding, and by 2^-15 for LSE's rounding where it is small, and each sum by its own rounding.
void ExpectWeightsSumToOne(const Attention& a, const Gradients& g, const Way& way) {
  const Problem& p = a.problem;
  for (int64_t kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
    for (int64_t d = 0; d < p.dim_v; ++d) {
      double sum = 0, size = 0, want = 0, most = 0;
      for (int64_t j = 0; j < p.len_k; ++j) {
        const double x = At(g.d_v.data, p.dtype, kv_head * g.d_v.stride_h + j * g.d_v.stride_l + d);
        sum += x;
        size += std::abs(x);
      }
      for (int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
        for (int64_t i = 0; i < p.len_q; ++i) {
          const double x = At(g.d_o.data, p.dtype, h * g.d_o.stride_h + i * g.d_o.stride_l + d);
          want += x;
          most += std::abs(x);
        }
      }
      const double weight = UnitRoundoff(FactorsOf(way, p)) + 0x1p-15;
      ASSERT_NEAR(sum, want, UnitRoundoff(p.dtype) * size + weight * most)
          << "head " << kv_head << ", column " << d;
    }
  }
}

// dV has the weights of the definition. They are known only for rows whose scores are equal, but
// then for scores of any size.
void ExpectWeights(const Attention& a, const Gradients& g, const Way& way) {
  const Problem& p = a.problem;
  const double weight = UnitRoundoff(FactorsOf(way, p)) + 0x1p-15;
  const double subnormal = p.dtype == DType::kFloat16 ? 0x1p-25 : 0.0;  // its rounding
  std::vector<double> want(static_cast<size_t>(p.len_k * p.dim_v)), allowed(want.size());
  for (int64_t h = 0; h < p.heads_q; ++h) {  // of one KV head
    for (int64_t i = 0; i < p.len_q; ++i) {
      for (const KeyGradient& key : ReferenceKeyGradients(a, g, {0, h, i})) {
        for (int64_t d = 0; d < p.dim_v; ++d) {
          const double x = key.weight * key.kept *
                           At(g.d_o.data, p.dtype, h * g.d_o.stride_h + i * g.d_o.stride_l + d);
          want[static_cast<size_t>(key.j * p.dim_v + d)] += x;
          allowed[static_cast<size_t>(key.j * p.dim_v + d)] += weight * std::abs(x);
        }
      }
    }
  }
  for (size_t n = 0; n < want.size(); ++n) {
    const auto at = static_cast<int64_t>(n);
    const double x = At(g.d_v.data, p.dtype, at / p.dim_v * g.d_v.stride_l + at % p.dim_v);
    const double rounding = std::max(UnitRoundoff(p.dtype) * std::abs(want[n]), subnormal);
    ASSERT_NEAR(x, want[n], allowed[n] + rounding) << n;
  }
}

// One finite number masks some rows, or all, throughout, as in additive padding masks.
TEST(CudaBackwardRows, WeightsSumToOneUnderFiniteMasks) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  int64_t n = 0;
  for (const DType dtype : kTypes) {
    for (const float value : {-1e4f, -1e6f, 1e7f, -1e7f, -1e9f, 3e38f, kLowest}) {
      for (const int64_t dim : {24, 64, 128, 192, 256}) {
        const int64_t rows = 3 + 67 * (n++ % 2);
        ProblemSpec spec = MakeSpec(1, 2, 1, rows, 150, dim, 16, dtype);
        spec.problem.has_bias = true;
        OwnedAttention owned = MakeAttention(spec, seed);
        const BiasView& bias = owned.attention.bias;
        for (int64_t row = 0; row < 2 * rows; ++row) {
          if (row % 3 == 2) continue;
          float* const at = static_cast<float*>(const_cast<void*>(bias.data)) +
                            row / rows * bias.stride_h + row % rows * bias.stride_q;
          std::fill_n(at, 150, value);
        }
        SCOPED_TRACE(Describe(spec) + " mask " + std::to_string(value));
        ExpectEachWay(&owned, seed, ExpectWeightsSumToOne);
      }
    }
  }
}

// Large scores without a mask: equal ones, and ones that differ by more than exp's range. Kernels
// that measured rows with other bits of scores than their products have would be far off.
TEST(CudaBackwardRows, WeightsSumToOneAtLargeScores) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (const DType dtype : kTypes) {
    for (const double size : {1e3, 1e5, 4e6, -4e7, 1e8}) {
      for (const int64_t dim : {64, 96, 128, 192, 256}) {
        for (const double spread : {0.0, 3e-3}) {
          ProblemSpec spec = MakeSpec(1, 2, 1, 150, 277, dim, dim > 128 ? 72 : dim, dtype);
          if (size == 1e5) spec.problem.mask = {Alignment::kTopLeft, -1, 0};
          if (size == 4e6 && spread == 0) spec = WithDropout(std::move(spec), seed);
          spec.problem.scale = 0.125f;
          OwnedAttention owned = MakeAttention(spec, seed);
          const double part = std::sqrt(std::abs(size) * 8 / static_cast<double>(dim));
          for (int64_t c = 0; c < dim; ++c) {
            for (int64_t j = 0; j < 277; ++j) {
              const double x =
                  part * (0.5 + 0.125 * static_cast<double>(c % 9)) * (1 + spread * normal(random));
              Set(owned.attention, owned.K(0, 0, j, c), static_cast<float>(x));
            }
            for (int64_t i = 0; i < 300; ++i) {
              const double x = std::copysign(part, size) / (1 + static_cast<double>(i % 7));
              Set(owned.attention, owned.Q(0, i / 150, i % 150, c), static_cast<float>(x));
            }
          }
          SCOPED_TRACE(Describe(spec) + " size " + std::to_string(size) + " spread " +
                       std::to_string(spread));
          ExpectEachWay(&owned, seed, spread == 0 ? ExpectWeights : ExpectWeightsSumToOne);
        }
      }
    }
  }
}

// Every feature that adds to scores, with rows that are measured.
TEST(CudaBackwardRows, MeasuredRowsOfEveryKindAreRight) {
  const uint64_t seed = FreshSeed();
  uint64_t n = 0;
  for (const DType dtype : kTypes) {
    for (const int64_t dim : {64, 128, 192}) {
      for (int kind = 0; kind < 6; ++kind) {
        ProblemSpec spec = MakeSpec(2, 4, 2, 100, 150, dim, dim > 128 ? 128 : dim, dtype);
        spec.magnitude_q = 60;
        spec.problem.has_sinks = kind % 2 == 0;
        spec.problem.has_bias = kind == 1;
        spec.problem.has_alibi = kind == 2;
        spec.problem.softcap = kind == 3 ? 200.0f : 0.0f;
        if (kind == 4) spec = WithDropout(std::move(spec), seed);
        if (kind == 5) spec.problem.mask.right = 0;
        if (n % 3 == 1) spec.q_lengths = {100, 61}, spec.kv_lengths = {77, 150};
        ExpectSpecRight(spec, seed + n++);
      }
    }
  }
}

// ---- NaN and Inf --------------------------------------------------------------------------------

// Whether a sequence's bytes of two contiguous gradients are the same.
bool SameSequence(const TensorView& x, const TensorView& y, int64_t b, DType dtype) {
  const auto bytes = static_cast<size_t>(x.stride_b * DTypeBytes(dtype));
  const auto at = static_cast<size_t>(b) * bytes;
  return std::memcmp(static_cast<const char*>(x.data) + at, static_cast<const char*>(y.data) + at,
                     bytes) == 0;
}

// NaN or Inf in the middle of three sequences, whose rows end within tiles; some have more tiles
// than a cluster blocks. Rows that see it match the reference, and all others keep their bits.
TEST(CudaBackwardRows, SpecialsReachOnlyTheirSequence) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  constexpr int64_t kDims[] = {64, 128, 96, 256, 24, 192};
  for (int n = 0; n < static_cast<int>(72 * TestScale()) + 6; ++n) {
    const int64_t dim = kDims[n % 6];
    const bool many = n % 7 == 3;
    const int64_t rows = many ? 320 : 70;
    const int64_t keys = many ? 600 : 110;
    ProblemSpec spec =
        MakeSpec(3, 2, 1, rows + n % 5, keys, dim, std::min<int64_t>(dim, 128), kTypes[n / 6 % 3]);
    if (n / 18 % 2 == 1) spec.problem.mask = {Alignment::kBottomRight, many ? -1 : 60, 0};
    if (n % 7 == 1) spec.problem.softcap = 30;
    spec.problem.has_sinks = n % 5 == 1;
    if (n % 4 == 1) spec = WithDropout(std::move(spec), seed);
    OwnedAttention owned = MakeAttention(spec, seed);
    const Attention& a = owned.attention;
    CpuReference(a);
    for (const Way& way : kWays) {
      OwnedGradients clean(a, seed), gradients(a, seed);
      if (!Takes(way, a, clean.get())) continue;
      OwnedAttention spoilt = MakeAttention(spec, seed);
      const Attention& b = spoilt.attention;
      const float poison = std::vector<float>{kNan, kInfinity, -kInfinity}[draw(3)];
      const int64_t column = draw(16);
      void* const places[] = {spoilt.Q(1, 0, draw(rows), column),
                              spoilt.K(1, 0, draw(keys), column),
                              spoilt.V(1, 0, draw(keys), column)};
      const int64_t place = draw(4);
      const ConstTensorView& d_o = gradients.get().d_o;
      if (place < 3) {
        Set(b, places[place], poison);
      } else {
        StoreElement(const_cast<void*>(d_o.data), a.problem.o_dtype(),
                     d_o.stride_b + draw(rows) * d_o.stride_l + column, poison);
      }
      CpuReference(b);
      SCOPED_TRACE(Describe(spec) + " " + NameOf(way) + ": " + std::to_string(poison) + " in " +
                   "QKVO"[place] + ", n " + std::to_string(n));
      Status status = RunBackward(&owned, &clean, way);
      if (status.ok()) status = RunBackward(&spoilt, &gradients, way);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const Gradients& x = clean.get();
      const Gradients& y = gradients.get();
      EXPECT_EQ(GradientsJudge(b, y, FactorsOf(way, b.problem)).Fault(y), "");
      EXPECT_TRUE(gradients.GuardsIntact());
      for (const int64_t other : {0, 2}) {
        EXPECT_TRUE(SameSequence(x.d_q, y.d_q, other, a.problem.dtype)) << other;
        EXPECT_TRUE(SameSequence(x.d_k, y.d_k, other, a.problem.dtype)) << other;
        EXPECT_TRUE(SameSequence(x.d_v, y.d_v, other, a.problem.dtype)) << other;
      }
    }
  }
}

// A gradient overflows fp16, or nearly, in sums that CUDA cores and Tensor Cores round differently.
// Which of them computes it does not depend on a NaN in another sequence.
TEST(CudaBackwardRows, OverflowsKeepTheirBitsBesideANan) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(3, 2, 1, 70, 110, 64, 64, DType::kFloat16);
  spec.problem.scale = 16;
  spec.magnitude_q = 0.01;
  OwnedAttention owned = MakeAttention(spec, seed), spoilt = MakeAttention(spec, seed);
  Set(spoilt.attention, spoilt.Q(1, 0, 7, 3), kNan);
  CpuReference(owned.attention);
  CpuReference(spoilt.attention);
  for (const Way& way : kWays) {
    SCOPED_TRACE(NameOf(way));
    OwnedGradients clean(owned.attention, seed), gradients(spoilt.attention, seed);
    if (!Takes(way, owned.attention, clean.get())) continue;
    for (const ConstTensorView& d_o : {clean.get().d_o, gradients.get().d_o}) {
      for (int64_t n = 0; n < 3 * 2 * 70 * 64; ++n) {
        const int64_t at = n / (2 * 70 * 64) * d_o.stride_b + n / (70 * 64) % 2 * d_o.stride_h +
                           n / 64 % 70 * d_o.stride_l + n % 64;
        const double x = 3300 * At(d_o.data, DType::kFloat16, at);
        StoreElement(const_cast<void*>(d_o.data), DType::kFloat16, at, static_cast<float>(x));
      }
    }
    Status status = RunBackward(&owned, &clean, way);
    if (status.ok()) status = RunBackward(&spoilt, &gradients, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const TensorView& d_q = clean.get().d_q;
    int64_t overflows = 0;
    for (int64_t n = 0; n < 70 * 64; ++n) {
      overflows += std::isinf(At(d_q.data, DType::kFloat16, n / 64 * d_q.stride_l + n % 64));
    }
    EXPECT_GT(overflows, 0);
    for (const int64_t other : {0, 2}) {
      EXPECT_TRUE(SameSequence(d_q, gradients.get().d_q, other, DType::kFloat16)) << other;
    }
  }
}

}  // namespace
}  // namespace attend::test
