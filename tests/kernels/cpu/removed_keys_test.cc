// SPDX-License-Identifier: Apache-2.0
//
// The three guarantees about keys without weight (problem.h), for cpu_flash and the reference: bits
// remove a key completely, a bias of -inf hides its V, and a finite bias hides nothing.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

void Flash(const Attention& a) {
  const Attention* batch[] = {&a};
  CpuFlash(batch);
}

// Any problem with a mask of bits.
ProblemSpec WithBits(ProblemSpec spec) {
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kBit;
  return spec;
}

void ClearBit(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t j) {
  const BiasView& bias = a.bias;
  const int64_t at = b * bias.stride_b + h * bias.stride_h + i * bias.stride_q + j;
  auto* const bytes = static_cast<uint8_t*>(const_cast<void*>(bias.data));
  bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] & ~(1 << at % 8));
}

// Removes some of the keys of every row by their bits. With `poison` their K and V become NaN and
// Inf.
void RemoveKeys(OwnedAttention* owned, uint64_t seed, bool poison) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  std::mt19937_64 random(seed);
  for (int64_t j = 0; j < p.len_k; ++j) {
    const uint64_t draw = random();
    if (draw % 3 == 0) continue;
    const float value = std::vector{kNan, kInfinity, -kInfinity}[draw / 3 % 3];
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < p.len_q; ++i) ClearBit(a, b, h, i, j);
      }
      if (!poison || j >= SequenceOf(a, b).k_len) continue;
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        const auto place = [&](int64_t dim) { return static_cast<int64_t>(draw >> 32) % dim; };
        Set(a, owned->K(b, h, j, place(p.dim)), value);
        Set(a, owned->V(b, h, j, place(p.dim_v)), value);
      }
    }
  }
}

std::vector<std::byte> Answer(OwnedAttention* owned,
                              const std::function<void(const Attention&)>& f) {
  owned->ResetOutput();
  f(owned->attention);
  return owned->OutputBytes();
}

TEST(RemovedKeys, BitsRemoveKeysCompletelyOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(300 * TestScale());
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = WithBits(RandomKernelSpec(seed + n, 3e5));
      if (n % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
      OwnedAttention clean = MakeAttention(spec, seed + n);
      OwnedAttention spoilt = MakeAttention(spec, seed + n);
      RemoveKeys(&clean, seed + n, false);
      RemoveKeys(&spoilt, seed + n, true);
      EXPECT_EQ(Answer(&spoilt, CpuReference), Answer(&clean, CpuReference)) << "cpu_reference";
      EXPECT_EQ(Answer(&spoilt, Flash), Answer(&clean, Flash)) << "cpu_flash";
      const RowsReport report = CheckAllRows(spoilt.attention, false);
      EXPECT_TRUE(report.ok) << report.detail;
    }
  });
}

// Few rows and many keys.
TEST(RemovedKeys, BitsRemoveKeysFromDecodingOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ForEachTarget([&] {
    for (const DType dtype : kDTypes) {
      for (const int64_t rows : {1, 3}) {
        ProblemSpec spec = WithBits(MakeSpec(2, 4, 2, rows, 700, 40, 48, dtype));
        OwnedAttention clean = MakeAttention(spec, seed);
        OwnedAttention spoilt = MakeAttention(spec, seed);
        RemoveKeys(&clean, seed, false);
        RemoveKeys(&spoilt, seed, true);
        EXPECT_EQ(Answer(&spoilt, Flash), Answer(&clean, Flash)) << Describe(spec);
      }
    }
  });
}

TEST(RemovedKeys, BitsRemoveKeysFromGradientsOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(200 * TestScale());
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = WithBits(RandomSpec(seed + n, 3e5));
      spec.problem.return_lse = true;
      if (n % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
      std::vector<std::vector<std::byte>> gradients;
      for (const bool poison : {false, true}) {
        OwnedAttention owned = MakeAttention(spec, seed + n);
        RemoveKeys(&owned, seed + n, poison);
        Flash(owned.attention);
        OwnedGradients flash(owned.attention, seed + n), reference(owned.attention, seed + n);
        CpuFlashGradients(owned.attention, flash.get());
        CpuReferenceGradients(owned.attention, reference.get());
        gradients.push_back(flash.Bytes());
        gradients.push_back(reference.Bytes());
      }
      EXPECT_EQ(gradients[2], gradients[0]) << "cpu_flash";
      EXPECT_EQ(gradients[3], gradients[1]) << "cpu_reference";
    }
  });
}

// Also where a slope is NaN, as the mask is applied after it.
TEST(RemovedKeys, RowsOfRemovedKeysSeeNone) {
  for (const int64_t rows : {2, 70}) {
    ProblemSpec spec = WithBits(MakeSpec(1, 1, 1, rows, 200, 16, 24));
    spec.problem.has_alibi = true;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    const Attention& a = owned.attention;
    *const_cast<float*>(a.alibi_slopes) = kNan;
    for (int64_t j = 0; j < 200; ++j) {
      for (int64_t i = 0; i < rows; ++i) ClearBit(a, 0, 0, i, j);
      Set(a, owned.K(0, 0, j, 3), j % 2 == 0 ? kNan : kInfinity);
      Set(a, owned.V(0, 0, j, 5), kNan);
    }
    for (const auto& compute : {std::function(Flash), std::function(CpuReference)}) {
      owned.ResetOutput();
      compute(a);
      for (int64_t i = 0; i < rows; ++i) {
        ASSERT_EQ(a.lse[i], -kInfinity);
        for (int64_t d = 0; d < 24; ++d) ASSERT_EQ(Get(a, owned.O(0, 0, i, d)), 0.0f);
      }
    }
    OwnedGradients gradients(a, 1);
    CpuFlashGradients(a, gradients.get());
    for (int64_t n = 0; n < 200 * 16; ++n) {
      ASSERT_EQ(static_cast<const float*>(gradients.get().d_k.data)[n], 0.0f);
    }
  }
}

// One key for each kind of score; V of all of them is NaN.
struct Kind {
  const char* name;
  float bias;
  float key;  // K's first element; Q's is above 0
  bool felt;
};

TEST(RemovedKeys, MinusInfinityHidesTheValueAndAFiniteBiasNothing) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const Kind& kind :
       {Kind{"-inf, K finite", -kInfinity, 1, false},
        Kind{"-inf, score -Inf", -kInfinity, -kInfinity, false},
        Kind{"-inf, score +Inf", -kInfinity, kInfinity, true},
        Kind{"-inf, K NaN", -kInfinity, kNan, true}, Kind{"the lowest number", kLowest, 1, true},
        Kind{"-1e9", -1e9f, 1, true}}) {
    for (const int64_t rows : {2, 70}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, rows, 200, 16, 24);
      spec.problem.has_bias = true;
      spec.bias_per_query = false;
      OwnedAttention owned = MakeAttention(spec, seed);
      const Attention& a = owned.attention;
      static_cast<float*>(const_cast<void*>(a.bias.data))[77] = kind.bias;
      for (int64_t i = 0; i < rows; ++i) Set(a, owned.Q(0, 0, i, 0), 1);
      Set(a, owned.K(0, 0, 77, 0), kind.key);
      for (int64_t d = 0; d < 24; ++d) Set(a, owned.V(0, 0, 77, d), kNan);
      for (const auto& compute : {std::function(Flash), std::function(CpuReference)}) {
        owned.ResetOutput();
        compute(a);
        for (int64_t i = 0; i < rows; ++i) {
          ASSERT_EQ(std::isnan(Get(a, owned.O(0, 0, i, 7))), kind.felt) << kind.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test
