// SPDX-License-Identifier: Apache-2.0
//
// The CPU's backward pass compared with the reference, for every instruction set of this machine,
// and its guarantees besides accuracy.

#include "kernels/cpu/flash_gradients.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/cpu/flash.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Forward(const Attention& a) {
  const Attention* batch[] = {&a};
  CpuFlash(batch);
}

// With the inputs of the backward pass.
ProblemSpec Trained(ProblemSpec spec) {
  spec.problem.return_lse = true;
  return spec;
}

void ExpectAllRight(const Attention& a, const OwnedGradients& gradients) {
  EXPECT_EQ(GradientsJudge(a, gradients.get()).Fault(gradients.get()), "");
  EXPECT_TRUE(gradients.GuardsIntact()) << "wrote outside its rows";
}

void ExpectSpecRight(const ProblemSpec& spec, uint64_t seed) {
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
  const OwnedAttention owned = MakeAttention(spec, seed);
  Forward(owned.attention);
  OwnedGradients gradients(owned.attention, seed + 1);
  ASSERT_TRUE(Check(owned.attention, gradients.get()).ok());
  CpuFlashGradients(owned.attention, gradients.get());
  ExpectAllRight(owned.attention, gradients);
}

// Scales the output gradients.
void ScaleInput(const Attention& a, Gradients* g, float factor) {
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = s.q_row; i < s.q_row + s.q_len; ++i) {
        const_cast<float*>(g->d_lse)[b * a.lse_stride_b + h * a.lse_stride_h + i] *= factor;
        const int64_t at = b * g->d_o.stride_b + h * g->d_o.stride_h + i * g->d_o.stride_l;
        for (int64_t d = at; d < at + p.dim_v; ++d) {
          void* const data = const_cast<void*>(g->d_o.data);
          StoreElement(data, p.o_dtype(), d, factor * LoadElement(data, p.o_dtype(), d));
        }
      }
    }
  }
}

TEST(CpuFlashGradients, RandomProblemsOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(300 * TestScale());
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = Trained(RandomSpec(seed + n, 3e5));
      if (n % 5 == 1) spec.problem.key_offset = static_cast<int64_t>(n % 37);
      if (n % 7 == 1) spec.problem.keys_after = static_cast<int64_t>(n % 41);
      if (n % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
      ExpectSpecRight(spec, seed + n);
    }
  });
}

TEST(CpuFlashGradients, HardShapesAreRightInEveryDType) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    for (const auto& [len_q, len_k, dim, dim_v] : {std::tuple{1, 1, 1, 1},
                                                   {1, 300, 1, 1},
                                                   {70, 1, 256, 256},
                                                   {97, 129, 255, 1},
                                                   {35, 1000, 1, 255},
                                                   {193, 65, 7, 9},
                                                   {3, 2500, 16, 16},
                                                   {200, 30, 24, 40}}) {
      for (const bool causal : {false, true}) {
        ProblemSpec spec = MakeSpec(1, 3, 1, len_q, len_k, dim, dim_v, dtype);
        if (causal) spec.problem.mask.right = 0;
        ExpectSpecRight(spec, seed);
      }
    }
  }
}

// Several slabs of keys and several bands of rows.
TEST(CpuFlashGradients, ALongSequenceIsRight) {
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(1, 2, 1, 700, 1500, 8, 8, DType::kBFloat16);
  spec.problem.mask.right = 0;
  ExpectSpecRight(spec, seed);
  spec = MakeSpec(1, 1, 1, 1200, 40, 256, 4);
  ExpectSpecRight(spec, seed);
  spec = MakeSpec(1, 700, 1, 3, 40, 256, 4);
  ExpectSpecRight(spec, seed);
}

TEST(CpuFlashGradients, ABiasSharedByAllIsSummedOverAll) {
  const uint64_t seed = FreshSeed();
  for (const bool per_query : {false, true}) {
    ProblemSpec spec = MakeSpec(3, 4, 2, 300, 650, 8, 8);
    spec.problem.has_bias = true;
    spec.bias_per_sequence = spec.bias_per_head = false;
    spec.bias_per_query = per_query;
    spec.q_lengths = {300, 0, 270};
    spec.kv_lengths = {20, 650, 600};
    ExpectSpecRight(spec, seed);
  }
}

TEST(CpuFlashGradients, EmptySequencesAmongOthersAreRight) {
  ProblemSpec spec = MakeSpec(0, 4, 2, 0, 0, 24, 16);
  spec.problem.packed = true;
  spec.q_lengths = {5, 0, 70, 3, 0, 9};
  spec.kv_lengths = {7, 4, 0, 90, 0, 100};
  ExpectSpecRight(spec, FreshSeed());
  spec.problem.mask.right = 0;
  ExpectSpecRight(spec, FreshSeed());
  for (const ProblemSpec& nothing : {MakeSpec(0, 2, 1, 5, 5, 8, 8), MakeSpec(2, 2, 1, 0, 5, 8, 8),
                                     MakeSpec(2, 2, 1, 5, 0, 8, 8)}) {
    ExpectSpecRight(nothing, 1);
  }
}

TEST(CpuFlashGradients, LargeAndSmallLossesInHalfAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const float factor : {1e4f, 1e-4f}) {
    const OwnedAttention owned =
        MakeAttention(MakeSpec(2, 2, 1, 90, 130, 64, 64, DType::kFloat16), seed);
    Forward(owned.attention);
    OwnedGradients gradients(owned.attention, seed);
    ScaleInput(owned.attention, &gradients.get(), factor);
    CpuFlashGradients(owned.attention, gradients.get());
    ExpectAllRight(owned.attention, gradients);
  }
}

TEST(CpuFlashGradients, BitsDoNotDependOnThreads) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::vector<ProblemSpec> specs;
  for (uint64_t n = 0; n < static_cast<uint64_t>(10 + 30 * TestScale()); ++n) {
    specs.push_back(Trained(RandomSpec(seed + n, 2e7)));
    if (n % 3 == 1) specs.back() = WithDropout(std::move(specs.back()), seed + n);
  }
  ProblemSpec slabs = MakeSpec(1, 6, 2, 800, 1700, 40, 24);
  slabs.problem.mask.right = 0;
  slabs.problem.has_bias = slabs.problem.has_sinks = true;
  specs.push_back(slabs);
  slabs.bias_per_head = false;
  specs.push_back(slabs);
  // More threads than cores, so that they interleave in every order.
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 8);
  for (const ProblemSpec& spec : specs) {
    SCOPED_TRACE(Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, seed);
    Forward(owned.attention);
    const auto bits = [&](int threads) {
      OwnedGradients gradients(owned.attention, seed);
      tbb::task_arena arena(threads);
      arena.execute([&] { CpuFlashGradients(owned.attention, gradients.get()); });
      return gradients.Bytes();
    };
    const std::vector<std::byte> alone = bits(1);
    for (const int threads : {3, 8, 8, 1}) ASSERT_EQ(bits(threads), alone) << threads;
  }
}

TEST(CpuFlashGradients, UnrequestedGradientsDoNotChangeTheOthers) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(2, 4, 2, 100, 130, 24, 40);
  spec.problem.has_bias = spec.problem.has_sinks = true;
  for (const bool shared : {false, true}) {
    spec.bias_per_head = !shared;
    const OwnedAttention owned = MakeAttention(spec, seed);
    Forward(owned.attention);
    OwnedGradients all(owned.attention, seed);
    CpuFlashGradients(owned.attention, all.get());
    OwnedGradients pieces(owned.attention, seed);
    const Gradients& g = pieces.get();
    for (int n = 0; n < 6; ++n) {
      Gradients one = g;
      if (n != 0) one.d_q.data = nullptr;
      if (n != 1) one.d_k.data = nullptr;
      if (n != 2) one.d_v.data = nullptr;
      if (n != 3) one.d_bias.data = nullptr;
      if (n != 4) one.d_sinks = nullptr;
      CpuFlashGradients(owned.attention, one);
    }
    EXPECT_EQ(pieces.Bytes(), all.Bytes());
  }
}

TEST(CpuFlashGradients, UnseenKeysNeverEnter) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      for (const int64_t key : {0, 63, 64, 150, 239}) {
        // No row sees the last 40 keys, nor the first ones.
        ProblemSpec spec = MakeSpec(1, 2, 1, 200, 240, 40, 48, dtype);
        spec.problem.mask = {Alignment::kTopLeft, 20, 0};
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        OwnedAttention owned = MakeAttention(spec, seed);
        Set(owned.attention, owned.K(0, 0, key, 3), poison);
        Set(owned.attention, owned.V(0, 0, key, 5), poison);
        Forward(owned.attention);
        OwnedGradients gradients(owned.attention, seed);
        CpuFlashGradients(owned.attention, gradients.get());
        ExpectAllRight(owned.attention, gradients);
        const float d_q = LoadElement(gradients.get().d_q.data, dtype, 100 * 40);
        EXPECT_TRUE(std::isfinite(d_q)) << "row 100 does not see key " << key;
      }
    }
  }
}

TEST(CpuFlashGradients, KeysThatBiasRemovesNeverEnter) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(2, 2, 2, 100, 130, 16, 16);
  spec.problem.has_bias = true;
  for (const bool shared : {false, true}) {
    spec.bias_per_query = !shared;
    spec.bias_per_head = spec.bias_per_sequence = !shared;
    OwnedAttention owned = MakeAttention(spec, seed);
    const BiasView& bias = owned.attention.bias;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 100; ++i) {
          const_cast<float*>(static_cast<const float*>(
              bias.data))[b * bias.stride_b + h * bias.stride_h + i * bias.stride_q + 77] =
              -kInfinity;
        }
      }
    }
    for (int64_t d = 0; d < 16; ++d) Set(owned.attention, owned.V(0, 0, 77, d), kNan);
    Forward(owned.attention);
    OwnedGradients gradients(owned.attention, 1);
    CpuFlashGradients(owned.attention, gradients.get());
    ExpectAllRight(owned.attention, gradients);
    EXPECT_TRUE(std::isfinite(static_cast<const float*>(gradients.get().d_q.data)[0]));
    EXPECT_TRUE(std::isfinite(static_cast<const float*>(gradients.get().d_bias.data)[0]));
  }
}

TEST(CpuFlashGradients, SpecialsOfOneSequenceStayThere) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const float poison : {kNan, kInfinity}) {
    ProblemSpec spec = MakeSpec(0, 2, 1, 0, 0, 16, 16);
    spec.problem.packed = true;
    spec.problem.has_sinks = true;
    spec.q_lengths = {40, 30, 50};
    spec.kv_lengths = {60, 45, 30};
    OwnedAttention owned = MakeAttention(spec, seed);
    Set(owned.attention, owned.Q(1, 0, 7, 2), poison);
    Set(owned.attention, owned.K(1, 0, 9, 2), poison);
    Forward(owned.attention);
    OwnedGradients gradients(owned.attention, 1);
    CpuFlashGradients(owned.attention, gradients.get());
    ExpectAllRight(owned.attention, gradients);
    const Gradients& g = gradients.get();
    EXPECT_TRUE(std::isfinite(static_cast<const float*>(g.d_q.data)[39 * g.d_q.stride_l]));
    EXPECT_TRUE(std::isfinite(static_cast<const float*>(g.d_k.data)[106 * g.d_k.stride_l]));
    EXPECT_TRUE(std::isnan(static_cast<const float*>(g.d_k.data)[61 * g.d_k.stride_l]));
  }
}

// Intermediate values leave fp32's range on the way to results that do not: some of dP.
TEST(CpuFlashGradients, IntermediateOverflowsDoNotReachTheGradients) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const bool shared : {false, true}) {
    ProblemSpec spec = MakeSpec(1, 2, 2, 40, 50, 8, 8);
    spec.problem.scale = 1e-6f;
    spec.problem.has_bias = true;
    spec.bias_per_head = !shared;
    OwnedAttention owned = MakeAttention(spec, seed);
    Forward(owned.attention);
    OwnedGradients gradients(owned.attention, seed);
    ScaleInput(owned.attention, &gradients.get(), 5e37f);
    CpuFlashGradients(owned.attention, gradients.get());
    ExpectAllRight(owned.attention, gradients);
    for (int64_t n = 0; n < 40 * 50; ++n) {
      const float x = static_cast<const float*>(gradients.get().d_bias.data)[n];
      EXPECT_TRUE(std::isfinite(x)) << n;
    }
  }
}

// Few rows are decoded, with other rounding than tiles: at such scales their scores then differ
// from those in LSE by more than any exponent can hold. Their weights must still be finite.
TEST(CpuFlashGradients, ScoresThatDisagreeWithLseGiveBoundedGradients) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const float scale : {1e4f, 1e6f, 1e9f, 1e30f, -1e30f}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 3, 200, 64, 8);
    spec.problem.scale = scale;
    const OwnedAttention owned = MakeAttention(spec, seed);
    Forward(owned.attention);
    OwnedGradients gradients(owned.attention, seed);
    const Gradients& g = gradients.get();
    CpuFlashGradients(owned.attention, g);
    for (int64_t d = 0; d < 8; ++d) {
      float most = 0;
      for (int64_t i = 0; i < 3; ++i) {
        most += std::abs(static_cast<const float*>(g.d_o.data)[i * 8 + d]);
      }
      for (int64_t j = 0; j < 200; ++j) {
        const float d_v = static_cast<const float*>(g.d_v.data)[j * 8 + d];
        EXPECT_LE(std::abs(d_v), most * (1 + 0x1p-20f)) << "scale " << scale << ", key " << j;
      }
    }
  }
}

// Hours of work, stopped once begun. Code that did not check the flag would hang.
void ExpectStops(const Attention& a, const Gradients& g) {
  StopFlag stop;
  std::thread runner([&] { CpuFlashGradients(a, g, &stop); });
  const std::clock_t begin = std::clock();
  while (std::clock() - begin < CLOCKS_PER_SEC / 20) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stop.Set();
  runner.join();
}

// All keys are one row, by a stride of 0.
TEST(CpuFlashGradients, EndsSoonAfterItsFlagIsSet) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 512, 512, 64, 1, 64, 64), 1);
  OwnedGradients gradients(owned.attention, 1);
  owned.attention.problem.len_k = int64_t{1} << 24;
  owned.attention.k.stride_l = owned.attention.v.stride_l = 0;
  gradients.get().d_k.data = gradients.get().d_v.data = nullptr;
  std::fill_n(owned.attention.lse, 512 * 64, 0.0f);
  ExpectStops(owned.attention, gradients.get());
}

// All heads add to one row of dBias: a single task.
TEST(CpuFlashGradients, EndsInTheMiddleOfASharedBias) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 2048, 500, 128, 128);
  spec.problem.has_bias = true;
  spec.bias_per_head = spec.bias_per_query = false;
  OwnedAttention owned = MakeAttention(spec, 1);
  Forward(owned.attention);
  OwnedGradients gradients(owned.attention, 1);
  Attention& a = owned.attention;
  Gradients& g = gradients.get();
  a.problem.heads_q = kHeadsMax;
  a.problem.heads_kv = 2;
  a.q.stride_h = a.k.stride_h = a.v.stride_h = a.o.stride_h = a.lse_stride_h = 0;
  g.d_o.stride_h = 0;
  g.d_q.data = g.d_k.data = g.d_v.data = nullptr;
  g.d_sinks = nullptr;
  ExpectStops(a, g);
}

}  // namespace
}  // namespace attend::test
