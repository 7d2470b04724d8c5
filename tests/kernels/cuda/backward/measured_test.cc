// SPDX-License-Identifier: Apache-2.0
//
// The GPU's backward pass for measured rows: with sinks, with scores of a scale of 0, and rows that
// are measured twice. O and LSE are the CPU's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

constexpr float kFarSinks[] = {100, 300, 1e5f, 1e7f, 3e38f};

// The sink has the whole weight of each row, so its gradient adds up dLSE, and all others are below
// fp32's smallest normal numbers.
void ExpectSinkHasAll(const Attention& a, const Gradients& g, const Way&) {
  const Problem& p = a.problem;  // of one head
  double want = 0, size = 0;
  for (int64_t i = 0; i < p.len_q; ++i) {
    want += static_cast<double>(g.d_lse[i]);
    size += static_cast<double>(std::abs(g.d_lse[i]));
  }
  EXPECT_NEAR(g.d_sinks[0], want, 0x1p-23 * size);
  const auto expect_none = [&](const char* what, const TensorView& got, int64_t rows, int64_t dim) {
    for (int64_t n = 0; n < rows * dim; ++n) {
      const float x = LoadElement(got.data, p.dtype, n / dim * got.stride_l + n % dim);
      ASSERT_LE(std::abs(x), 0x1p-100f) << what << " " << n;
    }
  };
  expect_none("dQ", g.d_q, p.len_q, p.dim);
  expect_none("dK", g.d_k, p.len_k, p.dim);
  expect_none("dV", g.d_v, p.len_k, p.dim_v);
}

// The sink's gradient is checked alone. The bounds of the others use the error that O in 16 bits
// causes in delta, and measured rows have another.
void ExpectSinkRight(const Attention& a, const Gradients& g, const Way& way) {
  Gradients sinks = g;
  sinks.d_q.data = sinks.d_k.data = sinks.d_v.data = sinks.d_bias.data = nullptr;
  EXPECT_EQ(GradientsJudge(a, sinks, FactorsOf(way, a.problem)).Fault(sinks), "");
}

// No element of dBias may be off by more than a fiftieth of the sum of its row: far less than the
// error from a weight with a wrong shift, and far more than rounding errors.
void ExpectBiasNear(const Attention& a, const Gradients& g, const Way&) {
  for (int64_t i = 0; i < a.problem.len_q; ++i) {
    const std::vector<KeyGradient> keys = ReferenceKeyGradients(a, g, {0, 0, i});
    double size = 0;
    for (const KeyGradient& key : keys) size += std::abs(key.d_score);
    for (const KeyGradient& key : keys) {
      const float got = static_cast<const float*>(g.d_bias.data)[i * g.d_bias.stride_l + key.j];
      ASSERT_NEAR(static_cast<double>(got), key.d_score, size / 50) << "row " << i;
    }
  }
}

// The first 30 of 70 rows see no key. Their LSE is the sink.
ProblemSpec SpecBesideSink(DType dtype) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 70, 40, 64, 64, dtype);
  spec.problem.mask.right = 0;
  spec.problem.has_sinks = true;
  return spec;
}

TEST(CudaBackwardMeasured, SinksFarAboveScoresAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : kTypes) {
    for (const float sink : kFarSinks) {
      for (const float softcap : {0.0f, 30.0f}) {
        ProblemSpec spec = SpecBesideSink(dtype);
        spec.problem.softcap = softcap;
        OwnedAttention owned = MakeAttention(spec, seed);
        *const_cast<float*>(owned.attention.sinks) = sink;
        SCOPED_TRACE(Describe(spec) + " sink " + std::to_string(sink));
        ExpectEachWay(&owned, seed, ExpectSinkHasAll);
      }
    }
  }
}

// A scale of 0 makes each score 0, even of products that a mask hides.
TEST(CudaBackwardMeasured, ASinkAboveScoresOfScaleZeroIsRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : kTypes) {
    ProblemSpec spec = SpecBesideSink(dtype);
    spec.problem.scale = 0;
    OwnedAttention owned = MakeAttention(spec, seed);
    *const_cast<float*>(owned.attention.sinks) = 100;
    SCOPED_TRACE(Describe(spec));
    ExpectEachWay(&owned, seed, ExpectSinkHasAll);
  }
}

// Sinks that large scores are near to share the weight with keys.
TEST(CudaBackwardMeasured, SinksNearLargeScoresAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : kTypes) {
    for (const float score : {72.0f, 150.0f, 300.0f, 1e5f}) {
      for (const float above : {-60.0f, -3.0f, 0.0f, 3.0f, 60.0f}) {
        ProblemSpec spec = SpecBesideSink(dtype);
        spec.problem.has_bias = true;
        OwnedAttention owned = MakeAttention(spec, seed);
        const BiasView& bias = owned.attention.bias;
        for (int64_t i = 0; i < 70; ++i) {
          std::fill_n(static_cast<float*>(const_cast<void*>(bias.data)) + i * bias.stride_q, 40,
                      score);
        }
        *const_cast<float*>(owned.attention.sinks) = score + above;
        SCOPED_TRACE(Describe(spec) + " score " + std::to_string(score) + " sink " +
                     std::to_string(score + above));
        ExpectEachWay(&owned, seed, ExpectSinkRight);
      }
    }
  }
}

// LSE of many rows is about where rows begin to need a shift. For dBias they are measured again,
// and products of another kind may put some of them on the other side.
TEST(CudaBackwardMeasured, RowsThatNeedAShiftOnlyTheFirstTimeAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 1, 1, 1500, 40, 128, 64, DType::kBFloat16);
  spec.problem.has_bias = true;
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  const auto fill = [&](int64_t i, float x) {
    std::fill_n(static_cast<float*>(const_cast<void*>(a.bias.data)) + i * a.bias.stride_q, 40, x);
  };
  for (int64_t i = 0; i < 1500; ++i) fill(i, 0);
  CpuReference(a);
  const double shifted = 256 * std::log(2.0);
  for (int64_t i = 0; i < 1500; ++i) {
    fill(i, static_cast<float>(shifted - static_cast<double>(a.lse[i])));
  }
  ExpectEachWay(&owned, seed, ExpectBiasNear);
}

}  // namespace
}  // namespace attend::test
