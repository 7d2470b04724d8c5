// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of cpu_flash_amx against the reference, with the tile unit's twin, on machines
// with AVX-512 and AVX512_BF16; where the machine has AMX, its gradients are the twin's bit for
// bit.

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/contract/decode_rule.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_gradients.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"
#include "tests/kernels/support/tile_twin.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kType = DType::kBFloat16;

void Forward(const Attention& a) {
  const Attention* batch[] = {&a};
  CpuFlash(batch, {}, 0);
}

using Pass = void (*)(const Attention&, const Gradients&, const StopFlag*);

OwnedGradients Compute(const Attention& a, uint64_t seed, Pass pass = CpuFlashAmxGradients) {
  Forward(a);
  OwnedGradients gradients(a, seed);
  pass(a, gradients.get(), nullptr);
  return gradients;
}

void ExpectRight(const Attention& a, const OwnedGradients& gradients) {
  EXPECT_EQ(GradientsJudge(a, gradients.get(), kType).Fault(gradients.get()), "");
  EXPECT_TRUE(gradients.GuardsIntact()) << "wrote outside its rows";
}

void ExpectSpecRight(const ProblemSpec& spec, uint64_t seed) {
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
  const OwnedAttention owned = MakeAttention(spec, seed);
  ExpectRight(owned.attention, Compute(owned.attention, seed));
}

ProblemSpec Trained(ProblemSpec spec) {
  Problem& p = spec.problem;
  p.return_lse = true;
  p.dtype = kType;
  p.o_float32 = false;
  if (p.has_bias) SetBias(spec.bias_dtype, &p);
  return spec;
}

// Any problem, in bf16 and with so many rows that tiles compute some.
ProblemSpec TileSpec(uint64_t seed, double work) {
  ProblemSpec spec;
  for (uint64_t at = seed;; at += 1000003) {
    spec = RandomSpec(at, work);
    if (spec.problem.len_q * spec.problem.group() > kDecodeRows || spec.problem.packed) break;
  }
  if (seed % 5 == 1) spec.problem.key_offset = static_cast<int64_t>(seed % 37);
  if (seed % 7 == 1) spec.problem.keys_after = static_cast<int64_t>(seed % 41);
  if (seed % 3 == 1) spec = WithDropout(std::move(spec), seed);
  return Trained(std::move(spec));
}

float GetDO(const Gradients& g, int64_t h, int64_t i, int64_t d) {
  return LoadElement(g.d_o.data, kType, h * g.d_o.stride_h + i * g.d_o.stride_l + d);
}

void SetDO(const Gradients& g, int64_t h, int64_t i, int64_t d, float value) {
  const int64_t at = h * g.d_o.stride_h + i * g.d_o.stride_l + d;
  StoreElement(const_cast<void*>(g.d_o.data), kType, at, value);
}

bool SameRow(const TensorView& x, const TensorView& y, int64_t dim, int64_t h, int64_t i) {
  const auto at = static_cast<size_t>(h * x.stride_h + i * x.stride_l) * 2;
  return std::memcmp(static_cast<char*>(x.data) + at, static_cast<char*>(y.data) + at,
                     static_cast<size_t>(dim) * 2) == 0;
}

using FlashGradientsAmx = AmxTest;

TEST_F(FlashGradientsAmx, RandomProblems) {
  const auto count = static_cast<uint64_t>(300 * TestScale());
  for (uint64_t n = 0; n < count && !HasFailure(); ++n) {
    ExpectSpecRight(TileSpec(seed_ + n, 3e5), seed_ + n);
  }
}

TEST_F(FlashGradientsAmx, HardShapes) {
  for (const auto& [len_q, len_k, dim, dim_v] : {std::tuple{30, 1, 1, 1},
                                                 {300, 1, 256, 256},
                                                 {97, 129, 255, 1},
                                                 {35, 1000, 1, 255},
                                                 {193, 65, 7, 9},
                                                 {64, 192, 64, 64},
                                                 {33, 97, 32, 31},
                                                 {49, 255, 33, 33}}) {
    for (const bool causal : {false, true}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, len_q, len_k, dim, dim_v, kType);
      if (causal) spec.problem.mask.right = 0;
      ExpectSpecRight(spec, seed_);
    }
  }
}

// Several slabs of keys and several bands of rows.
TEST_F(FlashGradientsAmx, ALongSequence) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 700, 1500, 8, 8, kType);
  spec.problem.mask.right = 0;
  ExpectSpecRight(spec, seed_);
  ExpectSpecRight(MakeSpec(1, 1, 1, 1200, 40, 256, 4, kType), seed_);
  ExpectSpecRight(MakeSpec(1, 700, 1, 3, 40, 256, 4, kType), seed_);
}

// A common part in keys, or in values, takes most of each product's bits.
TEST_F(FlashGradientsAmx, CommonPartsOfTheKeysAreRight) {
  for (const bool of_k : {false, true}) {
    for (const float common : {16.0f, 256.0f}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 90, 300, 64, 64, kType);
      OwnedAttention owned = MakeAttention(spec, seed_);
      for (int64_t j = 0; j < 300; ++j) {
        void* const at = of_k ? owned.K(0, 0, j, 3) : owned.V(0, 0, j, 3);
        Set(owned.attention, at, common + Get(owned.attention, at));
      }
      ExpectRight(owned.attention, Compute(owned.attention, seed_));
    }
  }
}

// Rows whose LSE is large are measured by cpu_flash.
TEST_F(FlashGradientsAmx, LargeScores) {
  for (const double magnitude : {30.0, 300.0, 3e4}) {
    ProblemSpec spec = MakeSpec(1, 2, 1, 90, 300, 64, 64, kType);
    spec.magnitude_q = magnitude;
    const OwnedAttention owned = MakeAttention(spec, seed_);
    const OwnedGradients gradients = Compute(owned.attention, seed_);
    const RowsReport report =
        CheckGradients(owned.attention, gradients.get(), seed_, 1e9, nullptr, true);
    EXPECT_FALSE(report.failed()) << report.detail;
  }
}

// Products below fp32's normal numbers, and far above.
TEST_F(FlashGradientsAmx, LargeAndSmallLosses) {
  for (const float factor : {0x1p-120f, 0x1p-100f, 0x1p-60f, 0x1p40f}) {
    for (const float value : {0x1p-30f, 1.0f}) {
      OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 90, 130, 64, 64, kType), seed_);
      for (int64_t j = 0; j < 130; ++j) {
        for (int64_t d = 0; d < 64; ++d) {
          void* const at = owned.V(0, 0, j, d);
          Set(owned.attention, at, value * Get(owned.attention, at));
        }
      }
      Forward(owned.attention);
      OwnedGradients gradients(owned.attention, seed_);
      const Gradients& g = gradients.get();
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 90; ++i) {
          const_cast<float*>(g.d_lse)[h * owned.attention.lse_stride_h + i] *= factor;
          for (int64_t d = 0; d < 64; ++d) SetDO(g, h, i, d, factor * GetDO(g, h, i, d));
        }
      }
      CpuFlashAmxGradients(owned.attention, g);
      ExpectRight(owned.attention, gradients);
    }
  }
}

// Rows that need subnormal numbers, fp32's range or IEEE's rules have cpu_flash's dQ, and change no
// other row's.
TEST_F(FlashGradientsAmx, UnfitRowsAreComputedAsCpuFlashDoes) {
  ProblemSpec spec = MakeSpec(1, 4, 2, 90, 300, 40, 48, kType);
  spec.problem.mask.right = 0;
  OwnedAttention clean = MakeAttention(spec, seed_);
  const OwnedGradients of_clean = Compute(clean.attention, seed_);
  ExpectRight(clean.attention, of_clean);
  for (const bool of_q : {false, true}) {
    for (const float value : {0x1p-130f, 0x1p61f, kNan, kInfinity, -kInfinity}) {
      OwnedAttention dirty = MakeAttention(spec, seed_);
      OwnedGradients amx(dirty.attention, seed_), flash(dirty.attention, seed_);
      for (const int64_t i : {0, 17, 18, 19, 89}) {
        if (of_q) Set(dirty.attention, dirty.Q(0, 2, i, 5), value);
        for (OwnedGradients* g : {&amx, &flash}) {
          if (!of_q) SetDO(g->get(), 2, i, 5, value);
        }
      }
      Forward(dirty.attention);
      CpuFlashAmxGradients(dirty.attention, amx.get());
      CpuFlashGradients(dirty.attention, flash.get());
      // The judge's bounds end where scores do.
      if (!of_q || value != 0x1p61f) ExpectRight(dirty.attention, amx);
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 90; ++i) {
          const bool unfit = h == 2 && (i == 0 || i == 89 || (i >= 17 && i <= 19));
          const OwnedGradients& same = unfit ? flash : of_clean;
          ASSERT_TRUE(SameRow(amx.get().d_q, same.get().d_q, 40, h, i))
              << h << " " << i << " " << value << (of_q ? " in Q" : " in dO");
        }
      }
    }
  }
}

// Elements of K and V that tiles cannot take reach the rows that see them, and no others.
TEST_F(FlashGradientsAmx, KeysAndValuesReachTheRowsThatSeeThem) {
  for (const float value : {0x1p-130f, 0x1p61f, kNan, kInfinity, -kInfinity}) {
    for (const bool of_k : {false, true}) {
      for (const int64_t key : {0, 95, 179}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 180, 180, 40, 48, kType);
        spec.problem.mask = {Alignment::kBottomRight, 20, 0};  // causal with a window
        OwnedAttention clean = MakeAttention(spec, seed_);
        OwnedAttention dirty = MakeAttention(spec, seed_);
        Set(dirty.attention, of_k ? dirty.K(0, 0, key, 3) : dirty.V(0, 0, key, 5), value);
        const OwnedGradients of_clean = Compute(clean.attention, seed_);
        const OwnedGradients of_dirty = Compute(dirty.attention, seed_);
        if (!of_k || value != 0x1p61f) ExpectRight(dirty.attention, of_dirty);
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t i = 0; i < 180; ++i) {
            if (i >= key && i <= key + 20) continue;
            ASSERT_TRUE(SameRow(of_dirty.get().d_q, of_clean.get().d_q, 40, h, i))
                << "row " << i << " felt key " << key;
          }
        }
      }
    }
  }
}

TEST_F(FlashGradientsAmx, SpecialsAnywhere) {
  const auto count = static_cast<uint64_t>(200 * TestScale());
  for (uint64_t n = 0; n < count && !HasFailure(); ++n) {
    ProblemSpec spec = TileSpec(seed_ + n, 3e5);
    spec.magnitude_q = std::min(spec.magnitude_q, 1.0);  // a weight of 0 is no key seen
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed_ + n);
    SetSpecials(&owned, seed_ + n);
    ExpectRight(owned.attention, Compute(owned.attention, seed_ + n));
  }
}

// A key that no row sees changes nothing, whatever it holds: beyond all rows, or removed by a bias.
TEST_F(FlashGradientsAmx, HiddenSpecialsChangeNoBit) {
  for (const bool removed : {false, true}) {
    ProblemSpec spec = MakeSpec(2, 4, 2, 130, 200, 40, 24, kType);
    spec.problem.mask = {Alignment::kTopLeft, 50, 0};
    spec.problem.has_bias = removed;
    spec.bias_per_query = spec.bias_per_head = false;
    OwnedAttention owned = MakeAttention(spec, seed_);
    const int64_t first = removed ? 20 : 130;
    for (int64_t b = 0; removed && b < 2; ++b) {
      auto* const bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
      for (const int64_t j : {20, 25, 89}) {
        bias[b * owned.attention.bias.stride_b + j] = -kInfinity;
      }
    }
    const std::vector<std::byte> clean = Compute(owned.attention, seed_).Bytes();
    for (const float poison : {kNan, kInfinity, -kInfinity, 0x1p-130f, 0x1p100f}) {
      for (const int64_t key : {first, first + 5, first + 69}) {
        // A bias does not hide a score that is NaN.
        if (!removed) Set(owned.attention, owned.K(1, 0, key, 3), poison);
        Set(owned.attention, owned.V(1, 1, key, 5), poison);
      }
      EXPECT_EQ(Compute(owned.attention, seed_).Bytes(), clean) << poison << " " << removed;
    }
  }
}

TEST_F(FlashGradientsAmx, BitsDoNotDependOnThreads) {
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 5);
  for (uint64_t n = 0; n < static_cast<uint64_t>(4 + 10 * TestScale()); ++n) {
    const ProblemSpec spec = TileSpec(seed_ + n, 2e6);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, seed_ + n);
    Forward(owned.attention);
    const auto bits = [&](int threads) {
      OwnedGradients gradients(owned.attention, seed_);
      tbb::task_arena arena(threads);
      arena.execute([&] { CpuFlashAmxGradients(owned.attention, gradients.get()); });
      return gradients.Bytes();
    };
    const std::vector<std::byte> alone = bits(1);
    for (const int threads : {3, 5}) ASSERT_EQ(bits(threads), alone) << threads;
  }
}

// A sequence alone has the bits that it has in a batch, beside rows that are measured or unfit.
// Sequences of few rows have cpu_flash's.
TEST_F(FlashGradientsAmx, ASequencesBitsDoNotDependOnOthers) {
  for (const int64_t rows : {12, 13, 100}) {
    ProblemSpec spec = MakeSpec(3, 4, 2, 100, 400, 24, 48, kType);
    spec.problem.mask.right = 0;
    spec.q_lengths = {rows, 100, 7};
    OwnedAttention owned = MakeAttention(spec, seed_);
    for (int64_t d = 0; d < 24; ++d) Set(owned.attention, owned.Q(1, 0, 7, d), 3e4f);
    Set(owned.attention, owned.K(1, 1, 30, 0), kNan);
    Forward(owned.attention);
    const auto compute = [&](const Attention& a, Pass pass) {
      OwnedGradients gradients(owned.attention, seed_);
      gradients.get().d_lse = nullptr;
      pass(a, gradients.get(), nullptr);
      return gradients;
    };
    Attention one = owned.attention;
    one.problem.batch = 1;
    const OwnedGradients whole = compute(owned.attention, CpuFlashAmxGradients);
    const OwnedGradients alone = compute(one, CpuFlashAmxGradients);
    const OwnedGradients flash = compute(one, CpuFlashGradients);
    const auto same = [](const Gradients& x, const Gradients& y) {
      bool all = true;
      for (const auto& [p, q] : {std::pair{x.d_q, y.d_q}, {x.d_k, y.d_k}, {x.d_v, y.d_v}}) {
        all = all && std::memcmp(p.data, q.data, static_cast<size_t>(p.stride_b) * 2) == 0;
      }
      return all;
    };
    EXPECT_TRUE(same(whole.get(), alone.get())) << rows;
    EXPECT_EQ(same(alone.get(), flash.get()), rows * 2 <= kDecodeRows) << rows;
  }
}

TEST_F(FlashGradientsAmx, GradientsAskedForAloneAreRight) {
  ProblemSpec spec = MakeSpec(2, 4, 2, 100, 130, 24, 40, kType);
  spec.problem.has_bias = spec.problem.has_sinks = true;
  for (const bool shared : {false, true}) {
    spec.bias_per_head = !shared;
    OwnedAttention owned = MakeAttention(spec, seed_);
    Set(owned.attention, owned.V(0, 1, 30, 0), 0x1p-130f);
    Forward(owned.attention);
    OwnedGradients pieces(owned.attention, seed_);
    for (int n = 0; n < 5; ++n) {
      Gradients one = pieces.get();
      if (n != 0) one.d_q.data = nullptr;
      if (n != 1) one.d_k.data = nullptr;
      if (n != 2) one.d_v.data = nullptr;
      if (n != 3) one.d_bias.data = nullptr;
      if (n != 4) one.d_sinks = nullptr;
      CpuFlashAmxGradients(owned.attention, one);
    }
    ExpectRight(owned.attention, pieces);
  }
}

TEST(MachinesTilesBackward, GiveTheSameBitsAsTheTwin) {
  if (!cpu_flash::WhyNoAmx().empty()) GTEST_SKIP() << cpu_flash::WhyNoAmx();
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(100 * TestScale()); ++n) {
    const ProblemSpec spec = TileSpec(seed + n, 3e5);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, seed + n);
    const std::vector<std::byte> machine = Compute(owned.attention, seed).Bytes();
    const WithTwinTiles twin;
    ASSERT_EQ(machine, Compute(owned.attention, seed).Bytes());
  }
}

}  // namespace
}  // namespace attend::test
