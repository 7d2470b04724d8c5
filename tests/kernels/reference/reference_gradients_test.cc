// SPDX-License-Identifier: Apache-2.0
//
// The reference's gradients compared with finite differences of its forward pass in double
// precision, and every edge case of the contract.

#include "kernels/reference/reference_gradients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Elements and the steps of differences are multiples of this, so that their sums are exact in
// fp32.
constexpr double kGrid = 0x1p-12;
constexpr double kStep = 0x1p-6;

// The sum of dO . O + dLSE . LSE over all rows; rows without keys have no dLSE.
double Loss(const Attention& a, const Gradients& g) {
  const Problem& p = a.problem;
  double loss = 0;
  std::vector<double> o(static_cast<size_t>(p.dim_v));
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < s.q_len; ++i) {
        double lse = 0;
        ReferenceRow(a, b, h, i, o.data(), &lse);
        const int64_t at = b * g.d_o.stride_b + h * g.d_o.stride_h + (s.q_row + i) * g.d_o.stride_l;
        for (int64_t d = 0; d < p.dim_v; ++d) {
          loss += o[static_cast<size_t>(d)] *
                  static_cast<double>(LoadElement(g.d_o.data, p.o_dtype(), at + d));
        }
        if (std::isinf(lse)) continue;
        loss += lse *
                static_cast<double>(g.d_lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i]);
      }
    }
  }
  return loss;
}

// The derivative of the loss by one input, and its error bound.
struct Difference {
  double value = 0;
  double error = 0;
};

Difference Differentiate(const Attention& a, const Gradients& g, float* x) {
  const float before = *x;
  const auto central = [&](double step) {
    *x = static_cast<float>(static_cast<double>(before) + step);
    const double up = Loss(a, g);
    *x = static_cast<float>(static_cast<double>(before) - step);
    const double down = Loss(a, g);
    *x = before;
    return (up - down) / (2 * step);
  };
  const double coarse = central(kStep);
  const double fine = central(kStep / 2);
  // Richardson extrapolation leaves an error of fourth order. The second-order term bounds it if
  // the step is small beside the scale of the function.
  const double value = fine + (fine - coarse) / 3;
  return {value, std::abs(fine - coarse) / 8 + 1e-10 * (1 + std::abs(value)) + 1e-11 / kStep};
}

void RoundToGrid(float* x) {
  if (std::isfinite(*x)) *x = static_cast<float>(std::round(*x / kGrid) * kGrid);
}

// A problem whose inputs are on the grid, with values of order 1.
ProblemSpec SmoothSpec(uint64_t seed) {
  ProblemSpec spec = RandomSpec(seed, 4e3);
  if (seed % 2 == 1) spec = WithDropout(std::move(spec), seed);
  Problem& p = spec.problem;
  p.dtype = DType::kFloat32;
  p.o_float32 = false;
  p.return_lse = true;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.dim)));
  spec.bias_dtype = DType::kFloat32;
  spec.magnitude_q = 1;
  return spec;
}

float* Mutable(const float* x) { return const_cast<float*>(x); }

class ReferenceGradientsTest : public ::testing::Test {
 protected:
  void Make(const ProblemSpec& spec, uint64_t seed) {
    owned_ = MakeAttention(spec, seed);
    const Attention& a = owned_.attention;
    const Problem& p = a.problem;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = SequenceOf(a, b);
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          for (int64_t d = 0; d < p.dim; ++d) RoundToGrid(Q(b, h, i, d));
        }
      }
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        for (int64_t j = 0; j < s.k_len; ++j) {
          for (int64_t d = 0; d < p.dim; ++d) RoundToGrid(K(b, h, j, d));
          for (int64_t d = 0; d < p.dim_v; ++d) RoundToGrid(V(b, h, j, d));
        }
      }
    }
    for (int64_t h = 0; p.has_sinks && h < p.heads_q; ++h) RoundToGrid(Mutable(a.sinks + h));
    for (int64_t b = 0; p.has_bias && b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < p.len_q; ++i) {
          for (int64_t j = 0; j < p.len_k; ++j) RoundToGrid(Bias(b, h, i, j));
        }
      }
    }
    gradients_.emplace(a, seed + 1);
    ASSERT_TRUE(Check(a, gradients_->get()).ok());
    CpuReferenceGradients(a, gradients_->get());
    EXPECT_TRUE(gradients_->GuardsIntact());
  }

  float* Q(int64_t b, int64_t h, int64_t i, int64_t d) {
    return static_cast<float*>(owned_.Q(b, h, i, d));
  }
  float* K(int64_t b, int64_t h, int64_t j, int64_t d) {
    return static_cast<float*>(owned_.K(b, h, j, d));
  }
  float* V(int64_t b, int64_t h, int64_t j, int64_t d) {
    return static_cast<float*>(owned_.V(b, h, j, d));
  }

  float* Bias(int64_t b, int64_t h, int64_t i, int64_t j) {
    const BiasView& t = owned_.attention.bias;
    return static_cast<float*>(const_cast<void*>(t.data)) + b * t.stride_b + h * t.stride_h +
           i * t.stride_q + j;
  }

  void ExpectDerivative(float got, float* x, const std::string& what) {
    const Difference wanted = Differentiate(owned_.attention, gradients_->get(), x);
    const double rounding = 0x1p-24 * std::abs(wanted.value);
    EXPECT_NEAR(static_cast<double>(got), wanted.value, wanted.error + rounding) << what;
    ++compared_;
    if (std::abs(got) > 1e-3) ++counting_;
  }

  OwnedAttention owned_;
  std::optional<OwnedGradients> gradients_;
  int64_t compared_ = 0;
  int64_t counting_ = 0;  // gradients among them that are not close to 0
};

// Element d of a row.
float At(const TensorView& t, int64_t b, int64_t h, int64_t row, int64_t d) {
  return static_cast<const float*>(t.data)[b * t.stride_b + h * t.stride_h + row * t.stride_l + d];
}

TEST_F(ReferenceGradientsTest, EqualFiniteDifferencesOfTheForwardPass) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(300 * std::max(0.1, TestScale())); ++n) {
    const ProblemSpec spec = SmoothSpec(seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    ASSERT_NO_FATAL_FAILURE(Make(spec, seed + n));
    const Attention& a = owned_.attention;
    const Problem& p = a.problem;
    const Gradients& g = gradients_->get();
    std::mt19937_64 random(seed + n);
    const auto any = [&](int64_t count) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(count));
    };
    for (int round = 0; round < 6 && p.batch > 0; ++round) {
      const int64_t b = any(p.batch);
      const Sequence s = SequenceOf(a, b);
      if (s.q_len == 0 || s.k_len == 0) continue;
      const int64_t h = any(p.heads_q), kv = any(p.heads_kv), i = any(s.q_len), j = any(s.k_len);
      const int64_t d = any(p.dim), d_v = any(p.dim_v);
      ExpectDerivative(At(g.d_q, b, h, s.q_row + i, d), Q(b, h, i, d), "dQ");
      ExpectDerivative(At(g.d_k, b, kv, s.k_row + j, d), K(b, kv, j, d), "dK");
      ExpectDerivative(At(g.d_v, b, kv, s.k_row + j, d_v), V(b, kv, j, d_v), "dV");
      if (p.has_sinks) ExpectDerivative(g.d_sinks[h], Mutable(a.sinks + h), "dSink");
      if (!p.has_bias) continue;
      float* const bias = Bias(b, h, i, j);
      const float got =
          static_cast<const float*>(g.d_bias.data)[bias - static_cast<const float*>(a.bias.data)];
      if (std::isinf(*bias)) {
        EXPECT_EQ(got, 0) << "a key that bias removes";
      } else {
        ExpectDerivative(got, bias, "dBias");
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(counting_, compared_ / 4) << "of " << compared_;
}

TEST_F(ReferenceGradientsTest, PaddingAndRowsWithoutKeysGetZeros) {
  ProblemSpec spec = MakeSpec(2, 4, 2, 6, 5, 8, 16);
  spec.q_lengths = {4, 6};
  spec.kv_lengths = {3, 0};
  spec.problem.mask.right = 0;  // bottom-right: the first row of sequence 0 sees no key
  ASSERT_NO_FATAL_FAILURE(Make(spec, 1));
  const Gradients& g = gradients_->get();
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t d = 0; d < 8; ++d) {
      for (const int64_t i : {0, 4, 5}) EXPECT_EQ(At(g.d_q, 0, h, i, d), 0);
      for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(At(g.d_q, 1, h, i, d), 0);
      EXPECT_NE(At(g.d_q, 0, h, 3, d), 0);
    }
  }
  EXPECT_TRUE(ReferenceKeyGradients(owned_.attention, g, {0, 0, 4}).empty());
  for (int64_t h = 0; h < 2; ++h) {
    for (const int64_t j : {3, 4}) EXPECT_EQ(At(g.d_k, 0, h, j, 0), 0);
    for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(At(g.d_v, 1, h, j, 0), 0);
    EXPECT_NE(At(g.d_v, 0, h, 2, 0), 0);
  }
}

// With one key its weight is 1 for any score, so only LSE depends on Q and K.
TEST_F(ReferenceGradientsTest, WithOneKeyDVIsDO) {
  ASSERT_NO_FATAL_FAILURE(Make(MakeSpec(1, 1, 1, 1, 1, 4, 4), 1));
  Gradients& g = gradients_->get();
  g.d_lse = nullptr;
  CpuReferenceGradients(owned_.attention, g);
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT_EQ(At(g.d_v, 0, 0, 0, d), static_cast<const float*>(g.d_o.data)[d]);
    EXPECT_EQ(At(g.d_q, 0, 0, 0, d), 0);
    EXPECT_EQ(At(g.d_k, 0, 0, 0, d), 0);
  }
}

// With O and LSE of the whole, dK and dV of a part equal the whole's, and the parts' dQ add up.
TEST_F(ReferenceGradientsTest, PartsOfTheKeysAddUpToTheWhole) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  constexpr int64_t kRows = 7, kKeys = 12, kFirst = 5, kDim = 8;
  ProblemSpec spec = MakeSpec(1, 2, 1, kRows, kKeys, kDim, kDim);
  spec.problem.mask.right = 0;
  spec.problem.dropout = 20000;
  spec.dropout = {.seed = seed, .head = 5, .row = 6};
  spec.problem.return_lse = true;
  ASSERT_NO_FATAL_FAILURE(Make(spec, seed));
  const Attention& whole = owned_.attention;
  CpuReference(whole);
  Gradients& g = gradients_->get();
  g.d_lse = nullptr;
  CpuReferenceGradients(whole, g);
  std::vector<double> d_q(static_cast<size_t>(2 * kRows * kDim));
  for (const bool second : {false, true}) {
    Attention part = whole;
    part.problem.len_k = second ? kKeys - kFirst : kFirst;
    part.problem.key_offset = second ? kFirst : 0;
    part.problem.keys_after = second ? 0 : kKeys - kFirst;
    const int64_t first = second ? kFirst * whole.k.stride_l : 0;
    part.k.data = static_cast<const float*>(whole.k.data) + first;
    part.v.data = static_cast<const float*>(whole.v.data) + first;
    OwnedGradients of_part(part, seed);
    of_part.get().d_o = g.d_o;
    of_part.get().d_lse = nullptr;
    CpuReferenceGradients(part, of_part.get());
    for (int64_t d = 0; d < kDim; ++d) {
      for (int64_t j = 0; j < part.problem.len_k; ++j) {
        const int64_t row = part.problem.key_offset + j;
        EXPECT_NEAR(At(of_part.get().d_k, 0, 0, j, d), At(g.d_k, 0, 0, row, d), 1e-5);
        EXPECT_NEAR(At(of_part.get().d_v, 0, 0, j, d), At(g.d_v, 0, 0, row, d), 1e-5);
      }
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < kRows; ++i) {
          d_q[static_cast<size_t>((h * kRows + i) * kDim + d)] += At(of_part.get().d_q, 0, h, i, d);
        }
      }
    }
  }
  for (int64_t n = 0; n < 2 * kRows * kDim; ++n) {
    const int64_t h = n / kDim / kRows, i = n / kDim % kRows;
    EXPECT_NEAR(d_q[static_cast<size_t>(n)], At(g.d_q, 0, h, i, n % kDim), 1e-5);
  }
}

TEST_F(ReferenceGradientsTest, HiddenKeysAreNotRead) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 3, 4, 8, 8);
  spec.problem.mask = {Alignment::kTopLeft, -1, 0};  // no row sees key 3
  ASSERT_NO_FATAL_FAILURE(Make(spec, 1));
  for (int64_t d = 0; d < 8; ++d) *K(0, 0, 3, d) = *V(0, 0, 3, d) = kNan;
  CpuReferenceGradients(owned_.attention, gradients_->get());
  const Gradients& g = gradients_->get();
  for (int64_t d = 0; d < 8; ++d) {
    for (int64_t n = 0; n < 3; ++n) {
      EXPECT_TRUE(std::isfinite(At(g.d_q, 0, 0, n, d)));
      EXPECT_TRUE(std::isfinite(At(g.d_k, 0, 0, n, d)));
      EXPECT_TRUE(std::isfinite(At(g.d_v, 0, 0, n, d)));
    }
    EXPECT_EQ(At(g.d_k, 0, 0, 3, d), 0);
    EXPECT_EQ(At(g.d_v, 0, 0, 3, d), 0);
  }
}

TEST_F(ReferenceGradientsTest, KeysThatBiasRemovesAreNotRead) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 2, 3, 4, 4);
  spec.problem.has_bias = true;
  ASSERT_NO_FATAL_FAILURE(Make(spec, 1));
  for (int64_t i = 0; i < 2; ++i) *Bias(0, 0, i, 1) = -std::numeric_limits<float>::infinity();
  for (int64_t d = 0; d < 4; ++d) *V(0, 0, 1, d) = kNan;
  CpuReferenceGradients(owned_.attention, gradients_->get());
  const Gradients& g = gradients_->get();
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT_TRUE(std::isfinite(At(g.d_q, 0, 0, 0, d)));
    EXPECT_NE(At(g.d_k, 0, 0, 0, d), 0);
    EXPECT_EQ(At(g.d_k, 0, 0, 1, d), 0);
    EXPECT_EQ(At(g.d_v, 0, 0, 1, d), 0);
  }
}

// If V and dO are the identity, O and dV are the weights with the dropout applied.
TEST_F(ReferenceGradientsTest, DropoutIsTheSameAsInTheForwardPass) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  constexpr int64_t kKeys = 50;
  ProblemSpec spec = MakeSpec(1, 1, 1, kKeys, kKeys, 8, kKeys);
  spec.problem.dropout = 40000;
  spec.dropout = {.seed = seed, .sequence = 1, .row = 3};
  ASSERT_NO_FATAL_FAILURE(Make(spec, seed));
  for (int64_t n = 0; n < kKeys * kKeys; ++n) {
    const float one = n % (kKeys + 1) == 0 ? 1.0f : 0.0f;
    *V(0, 0, n / kKeys, n % kKeys) = one;
    static_cast<float*>(const_cast<void*>(gradients_->get().d_o.data))[n] = one;
  }
  CpuReferenceGradients(owned_.attention, gradients_->get());
  int64_t dropped = 0;
  for (int64_t i = 0; i < kKeys; ++i) {
    std::vector<double> o(kKeys);
    double lse = 0;
    ReferenceRow(owned_.attention, 0, 0, i, o.data(), &lse);
    for (int64_t j = 0; j < kKeys; ++j) {
      const double weight = o[static_cast<size_t>(j)];
      dropped += weight == 0 ? 1 : 0;
      EXPECT_EQ(weight != 0, DropoutKeeps(40000, seed, 1, 0, i + 3, j));
      EXPECT_FLOAT_EQ(At(gradients_->get().d_v, 0, 0, j, i), static_cast<float>(weight));
    }
  }
  EXPECT_GT(dropped, kKeys * kKeys / 3);
}

TEST_F(ReferenceGradientsTest, GradientsThatDoNotExistAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Make(MakeSpec(1, 1, 1, 2, 2, 4, 4), 1));
  Attention a = owned_.attention;
  Gradients g = gradients_->get();
  float any = 0;
  g.d_sinks = &any;
  EXPECT_EQ(Check(a, g).code(), Code::kInvalidArgument);
  g.d_sinks = nullptr;
  g.d_bias.data = &any;
  EXPECT_EQ(Check(a, g).code(), Code::kInvalidArgument);
  a.problem.has_bias = true;
  a.bias.dtype = DType::kBit;
  EXPECT_EQ(Check(a, g).message(), "d_bias is requested, but the bias is a mask of bits");
  a.bias.dtype = DType::kFloat32;
  EXPECT_TRUE(Check(a, g).ok());
  a.problem.has_bias = false;
  g.d_bias.data = nullptr;
  a.problem.return_lse = false;
  EXPECT_EQ(Check(a, g).code(), Code::kInvalidArgument);
  a.problem.return_lse = true;
  a.problem.page_rows = 64;
  EXPECT_EQ(Check(a, g).code(), Code::kUnimplemented);
}

}  // namespace
}  // namespace attend::test
