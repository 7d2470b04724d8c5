// SPDX-License-Identifier: Apache-2.0
//
// Rows that need special care in the CPU's backward pass: with a large LSE, with keys that have a
// common part, and with NaN and Inf.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Both of the CPU's passes.
OwnedGradients Compute(const Attention& a, uint64_t seed, bool d_lse = true) {
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed);
  if (!d_lse) gradients.get().d_lse = nullptr;
  CpuFlashGradients(a, gradients.get());
  return gradients;
}

double At(const void* data, DType dtype, int64_t element) {
  return static_cast<double>(LoadElement(data, dtype, element));
}

// Over the keys, a row's weights in dV sum to 1: dV adds up to dO. Each weight is off by LSE's
// rounding, at most 2^-16, and each sum by less; 16-bit results also by their own rounding.
void ExpectWeightsSumToOne(const Attention& a, const Gradients& g) {
  const Problem& p = a.problem;
  const double unit = UnitRoundoff(p.dtype);
  for (int64_t d = 0; d < p.dim_v; ++d) {
    double sum = 0, size = 0, want = 0, most = 0;
    for (int64_t j = 0; j < p.len_k; ++j) {
      const double x = At(g.d_v.data, p.dtype, j * g.d_v.stride_l + d);
      sum += x;
      size += std::abs(x);
    }
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) {
        const int64_t at = h * g.d_o.stride_h + i * g.d_o.stride_l + d;
        want += At(g.d_o.data, p.dtype, at);
        most += std::abs(At(g.d_o.data, p.dtype, at));
      }
    }
    ASSERT_NEAR(sum, want, unit * size + 0x1p-15 * most) << "column " << d;
  }
}

// All keys of most rows have a score of -inf, by an infinite slope, and no weight.
TEST(CpuFlashGradientsRows, RowsThatAnInfiniteSlopeHidesAreZero) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    ProblemSpec spec = MakeSpec(1, 1, 1, 70, 2, 8, 8);
    spec.problem.return_lse = spec.problem.has_alibi = true;
    const OwnedAttention owned = MakeAttention(spec, seed);
    *const_cast<float*>(owned.attention.alibi_slopes) = kInfinity;
    const OwnedGradients gradients = Compute(owned.attention, seed);
    const TensorView& d_q = gradients.get().d_q;
    for (int64_t i = 0; i < 70; ++i) {
      const double x = At(d_q.data, DType::kFloat32, i * d_q.stride_l);
      EXPECT_TRUE(i < 68 ? x == 0 : std::isnan(x)) << i << " " << x;
    }
  });
}

// As with additive padding masks: some rows, or all, are masked by one finite number throughout.
TEST(CpuFlashGradientsRows, WeightsSumToOneUnderFiniteMasks) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const float value : {-1e4f, -1e6f, 1e7f, -1e7f, -1e9f, 3e38f, kLowest}) {
        for (const int64_t rows : {3, 70}) {  // the forward pass decodes three
          ProblemSpec spec = MakeSpec(1, 2, 1, rows, 150, 24, 16, dtype);
          spec.problem.has_bias = true;
          const OwnedAttention owned = MakeAttention(spec, seed);
          const BiasView& bias = owned.attention.bias;
          for (int64_t row = 0; row < 2 * rows; ++row) {
            if (row % 3 == 2) continue;
            float* const at = static_cast<float*>(const_cast<void*>(bias.data)) +
                              row / rows * bias.stride_h + row % rows * bias.stride_q;
            std::fill_n(at, 150, value);
          }
          SCOPED_TRACE(Describe(spec) + " mask " + std::to_string(value));
          const OwnedGradients gradients = Compute(owned.attention, seed);
          ExpectWeightsSumToOne(owned.attention, gradients.get());
        }
      }
    }
  });
}

// Large scores without a mask: equal ones, and ones that rise from key to key.
TEST(CpuFlashGradientsRows, WeightsSumToOneAtLargeScores) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const float size : {1e5f, 4e6f, -4e7f, 1e8f}) {
    for (const int64_t rows : {2, 3, 89, 90}) {
      const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, rows, 210, 8, 8), seed);
      const Attention& a = owned.attention;
      const float rise = rows % 2 == 0 ? 0 : 0x1p-16f;
      for (int64_t d = 0; d < 8; ++d) {
        for (int64_t j = 0; j < 210; ++j) {
          StoreElement(const_cast<void*>(a.k.data), DType::kFloat32, j * a.k.stride_l + d,
                       static_cast<float>(d + 1) * (1 + rise * static_cast<float>(j)));
        }
        for (int64_t i = 0; i < rows; ++i) {
          StoreElement(const_cast<void*>(a.q.data), DType::kFloat32, i * a.q.stride_l + d,
                       size / (3.0f + static_cast<float>(i)));
        }
      }
      SCOPED_TRACE("size " + std::to_string(size));
      const OwnedGradients gradients = Compute(a, seed);
      ExpectWeightsSumToOne(a, gradients.get());
    }
  }
}

// Keys and queries whose common part makes every score about -`size`; only their differences
// contribute to the gradients.
OwnedAttention WithCommonPart(DType dtype, double size, uint64_t seed) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 8, 40, 64, 64, dtype), seed);
  const Attention& a = owned.attention;
  const auto move = [&](const ConstTensorView& view, int64_t rows, double by) {
    for (int64_t n = 0; n < rows * 64; ++n) {
      const int64_t at = n / 64 * view.stride_l + n % 64;
      const double x = 0.3 * At(view.data, dtype, at) + by;
      StoreElement(const_cast<void*>(view.data), dtype, at, static_cast<float>(x));
    }
  };
  const double part = std::sqrt(size * 8) / 8;
  move(a.q, 8, -part);
  move(a.k, 40, part);
  return owned;
}

// dQ and dK in double.
std::pair<std::vector<double>, std::vector<double>> Truth(const Attention& a, const Gradients& g) {
  const Problem& p = a.problem;
  std::vector<double> d_q(static_cast<size_t>(p.len_q * p.dim)),
      d_k(static_cast<size_t>(p.len_k * p.dim));
  for (int64_t i = 0; i < p.len_q; ++i) {
    for (const KeyGradient& key : ReferenceKeyGradients(a, g, {0, 0, i})) {
      for (int64_t d = 0; d < p.dim; ++d) {
        d_q[static_cast<size_t>(i * p.dim + d)] +=
            key.d_dot * At(a.k.data, p.dtype, key.j * a.k.stride_l + d);
        d_k[static_cast<size_t>(key.j * p.dim + d)] +=
            key.d_dot * At(a.q.data, p.dtype, i * a.q.stride_l + d);
      }
    }
  }
  return {d_q, d_k};
}

// The largest error over the largest gradient.
double ErrorOf(const TensorView& got, DType dtype, int64_t dim, const std::vector<double>& truth) {
  double error = 0, most = 0;
  for (size_t n = 0; n < truth.size(); ++n) {
    const auto at = static_cast<int64_t>(n);
    const double x = At(got.data, dtype, at / dim * got.stride_l + at % dim);
    error = std::max(error, std::abs(x - truth[n]));
    most = std::max(most, std::abs(truth[n]));
  }
  return error / most;
}

// The rounding of dQ, as much for the possible error of delta, and the effect of rounding scores in
// fp32 on the weights: 10 u of the score (score_rounding.h), four times that where one key has most
// of the weight.
TEST(CpuFlashGradientsRows, ACommonPartOfTheKeysDoesNotChangeGradients) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const double size : {30.0, 300.0, 2500.0, 10000.0}) {
        if (size > 300 && dtype == DType::kFloat16) continue;  // fp32's scores say less than fp16
        const OwnedAttention owned = WithCommonPart(dtype, size, seed);
        const OwnedGradients gradients = Compute(owned.attention, seed, false);
        const Gradients& g = gradients.get();
        const auto [d_q, d_k] = Truth(owned.attention, g);
        const double allowed = 2 * UnitRoundoff(dtype) + 40 * UnitRoundoff(DType::kFloat32) * size;
        EXPECT_LE(ErrorOf(g.d_q, dtype, 64, d_q), allowed) << DTypeName(dtype) << " " << size;
        EXPECT_LE(ErrorOf(g.d_k, dtype, 64, d_k), allowed) << DTypeName(dtype) << " " << size;
      }
    }
  });
}

// A key that no row sees changes nothing, whatever it holds.
TEST(CpuFlashGradientsRows, HiddenSpecialsChangeNoBit) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : kDTypes) {
    ProblemSpec spec = MakeSpec(2, 4, 2, 130, 200, 40, 24, dtype);
    spec.problem.mask = {Alignment::kTopLeft, 50, 0};  // no row sees the last 70 keys
    spec.problem.softcap = dtype == DType::kFloat32 ? 20.0f : 0.0f;
    OwnedAttention owned = MakeAttention(spec, seed);
    const std::vector<std::byte> clean = Compute(owned.attention, seed).Bytes();
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      for (const int64_t key : {130, 135, 199}) {
        Set(owned.attention, owned.K(1, 0, key, 3), poison);
        Set(owned.attention, owned.V(1, 1, key, 5), poison);
      }
      EXPECT_EQ(Compute(owned.attention, seed).Bytes(), clean) << DTypeName(dtype);
    }
  }
}

// NaN or Inf in one place: rows that see it match the reference, and all others keep their bits.
TEST(CpuFlashGradientsRows, SpecialsReachOnlyTheRowsThatSeeThem) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int n = 0; n < static_cast<int>(60 * TestScale()); ++n) {
    const int64_t keys = n % 6 == 4 ? 40 : 110;  // some rows see none
    ProblemSpec spec = MakeSpec(2, 2, 1, 70, keys, 24, 16);
    if (n % 6 == 4) spec.problem.mask.right = 0;
    if (n % 2 == 1) spec.problem.mask = {Alignment::kBottomRight, 60, 0};
    if (n % 5 == 1) spec.problem.softcap = 30;
    spec.problem.has_sinks = n % 3 == 1;
    if (n % 4 == 1) spec = WithDropout(std::move(spec), seed);
    OwnedAttention owned = MakeAttention(spec, seed);
    const Attention& a = owned.attention;
    if (spec.problem.has_sinks && n % 2 == 0) {  // rows of a large LSE, of small weights
      std::fill_n(const_cast<float*>(a.sinks), 2, n % 4 == 0 ? 262.0f : 300.0f);
    }
    const OwnedGradients clean = Compute(a, seed);
    const float poison = std::vector<float>{kNan, kInfinity, -kInfinity}[draw(3)];
    const int64_t column = draw(16);
    OwnedGradients gradients(a, seed);
    void* const places[] = {owned.Q(1, 0, draw(70), column), owned.K(1, 0, draw(keys), column),
                            owned.V(1, 0, draw(keys), column)};
    const int64_t place = draw(4);
    if (place < 3) {
      Set(a, places[place], poison);
    } else {
      const ConstTensorView& d_o = gradients.get().d_o;
      StoreElement(const_cast<void*>(d_o.data), DType::kFloat32,
                   d_o.stride_b + draw(70) * d_o.stride_l + column, poison);
    }
    const Attention* batch[] = {&a};
    CpuFlash(batch);
    CpuFlashGradients(a, gradients.get());
    const Gradients& g = gradients.get();
    EXPECT_EQ(GradientsJudge(a, g).Fault(g), "") << Describe(spec) << " " << poison << " in "
                                                 << "QKVO"[place] << ", n " << n;
    const auto same = [](const TensorView& x, const TensorView& y) {
      const auto bytes = static_cast<size_t>(x.stride_b) * sizeof(float);
      return std::memcmp(x.data, y.data, bytes) == 0;
    };
    EXPECT_TRUE(same(g.d_q, clean.get().d_q) && same(g.d_k, clean.get().d_k) &&
                same(g.d_v, clean.get().d_v))
        << "the other sequence, n " << n;
  }
}

// For any other sequences and any number of them. Rows that see few keys have gradients near 0,
// with relatively large rounding.
TEST(CpuFlashGradientsRows, ASequencesBitsDoNotDependOnOthers) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      ProblemSpec spec = MakeSpec(32, 2, 1, 40, 2000, 24, 48, dtype);
      spec.problem.mask = {alignment, -1, 0};
      OwnedAttention owned = MakeAttention(spec, seed);
      const Attention& a = owned.attention;
      const OwnedGradients whole = Compute(a, seed, /*d_lse=*/false);
      const auto expect_same = [&](const OwnedGradients& other, const char* beside) {
        const Gradients &x = whole.get(), &y = other.get();
        for (const auto& [p, q] : {std::pair{x.d_q, y.d_q}, {x.d_k, y.d_k}, {x.d_v, y.d_v}}) {
          const size_t bytes = static_cast<size_t>(p.stride_b) * DTypeBytes(dtype);
          EXPECT_EQ(std::memcmp(p.data, q.data, bytes), 0) << beside << ", " << Describe(spec);
        }
      };
      Attention one = a;
      one.problem.batch = 1;
      OwnedGradients alone(a, seed);
      alone.get().d_lse = nullptr;
      CpuFlashGradients(one, alone.get());
      expect_same(alone, "alone");
      for (int64_t d = 0; d < 24; ++d) Set(a, owned.Q(1, 0, 7, d), 6e4f);
      expect_same(Compute(a, seed, /*d_lse=*/false), "beside a row of a large LSE");
    }
  }
}

}  // namespace
}  // namespace attend::test
