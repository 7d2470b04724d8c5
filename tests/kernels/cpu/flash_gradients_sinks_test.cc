// SPDX-License-Identifier: Apache-2.0
//
// The CPU's backward pass for rows with sinks, with and without visible keys.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// The first 30 of 70 rows see no key. Their LSE is the sink.
ProblemSpec SpecBesideSink(DType dtype) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 70, 40, 64, 64, dtype);
  spec.problem.return_lse = true;
  spec.problem.mask.right = 0;
  spec.problem.has_sinks = true;
  return spec;
}

OwnedGradients Compute(const Attention& a, uint64_t seed) {
  const Attention* batch[] = {&a};
  CpuFlash(batch);
  OwnedGradients gradients(a, seed);
  CpuFlashGradients(a, gradients.get());
  return gradients;
}

// The sink has the whole weight of each row, whether the row sees keys or none, so its gradient
// adds up dLSE, and all others are below fp32's smallest normal numbers.
TEST(CpuFlashGradientsSinks, SinksFarAboveScoresAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const float sink : {100.0f, 300.0f, 1e5f, 1e7f, 3e38f}) {
        const ProblemSpec spec = SpecBesideSink(dtype);
        const OwnedAttention owned = MakeAttention(spec, seed);
        *const_cast<float*>(owned.attention.sinks) = sink;
        const OwnedGradients gradients = Compute(owned.attention, seed);
        SCOPED_TRACE(Describe(spec) + " sink " + std::to_string(sink));
        const Gradients& g = gradients.get();
        double want = 0, size = 0;
        for (int64_t i = 0; i < 70; ++i) {
          want += static_cast<double>(g.d_lse[i]);
          size += static_cast<double>(std::abs(g.d_lse[i]));
        }
        EXPECT_NEAR(g.d_sinks[0], want, 0x1p-23 * size);
        for (const TensorView* const to : {&g.d_q, &g.d_k, &g.d_v}) {
          for (int64_t n = 0; n < (to == &g.d_q ? 70 : 40) * 64; ++n) {
            const float x = LoadElement(to->data, dtype, n / 64 * to->stride_l + n % 64);
            ASSERT_LE(std::abs(x), 0x1p-100f) << n;
          }
        }
      }
    }
  });
}

// Keys whose scores are as large share the weight with the sink. Its gradient is checked alone: the
// bounds of the others use the error that O in 16 bits causes in delta, and measured rows have
// another.
TEST(CpuFlashGradientsSinks, SinksNearLargeScoresAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const float score : {72.0f, 150.0f, 300.0f, 1e5f}) {
      for (const float above : {-60.0f, -3.0f, 0.0f, 3.0f, 60.0f}) {
        ProblemSpec spec = SpecBesideSink(dtype);
        spec.problem.has_bias = true;
        const OwnedAttention owned = MakeAttention(spec, seed);
        const BiasView& bias = owned.attention.bias;
        for (int64_t i = 0; i < 70; ++i) {
          std::fill_n(static_cast<float*>(const_cast<void*>(bias.data)) + i * bias.stride_q, 40,
                      score);
        }
        *const_cast<float*>(owned.attention.sinks) = score + above;
        const OwnedGradients gradients = Compute(owned.attention, seed);
        SCOPED_TRACE(Describe(spec) + " score " + std::to_string(score) + " sink " +
                     std::to_string(score + above));
        Gradients g = gradients.get();
        g.d_q.data = g.d_k.data = g.d_v.data = g.d_bias.data = nullptr;
        EXPECT_EQ(GradientsJudge(owned.attention, g).Fault(g), "");
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
