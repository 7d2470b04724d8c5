// SPDX-License-Identifier: Apache-2.0
//
// cpu_flash_amx against the reference, with the tile unit's twin, on machines with AVX-512 and
// AVX512_BF16; where the machine has AMX, its answers are the twin's bit for bit.

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "kernels/contract/decode_rule.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"
#include "tests/kernels/support/tile_twin.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Amx(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch, {}, 0);
}

void Flash(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
}

std::vector<std::byte> Bits(OwnedAttention* owned, void (*kernel)(const OwnedAttention&) = Amx) {
  owned->ResetOutput();
  kernel(*owned);
  return owned->OutputBytes();
}

void ExpectRight(const OwnedAttention& owned) {
  const RowsReport report = CheckAllRows(owned.attention, true);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_TRUE(owned.GuardsIntact()) << "wrote outside its rows";
}

bool SameRow(OwnedAttention* x, OwnedAttention* y, int64_t h, int64_t i) {
  const Problem& p = x->attention.problem;
  const auto bytes = static_cast<size_t>(p.dim_v * DTypeBytes(p.o_dtype()));
  return std::memcmp(x->O(0, h, i, 0), y->O(0, h, i, 0), bytes) == 0;
}

using CpuFlashAmx = AmxTest;

// Any problem, in bf16 and with so many rows that tiles compute some.
ProblemSpec TileSpec(uint64_t seed) {
  ProblemSpec spec;
  do {
    spec = RandomKernelSpec(seed, 1e6);
    seed += 1000003;
  } while (spec.problem.len_q * spec.problem.group() <= kDecodeRows && !spec.problem.packed);
  if (seed % 3 == 1) spec = WithDropout(std::move(spec), seed);
  Problem& p = spec.problem;
  p.dtype = DType::kBFloat16;
  if (p.has_bias) SetBias(spec.bias_dtype, &p);
  return spec;
}

TEST_F(CpuFlashAmx, RandomProblems) {
  const auto count = static_cast<uint64_t>(600 * TestScale());
  for (uint64_t n = 0; n < count && !HasFailure(); ++n) {
    const ProblemSpec spec = TileSpec(seed_ + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed_ + n);
    Amx(owned);
    ExpectRight(owned);
  }
}

TEST_F(CpuFlashAmx, HardShapes) {
  for (const auto& [len_q, len_k, dim, dim_v] : {std::tuple{30, 1, 1, 1},
                                                 {300, 1, 256, 256},
                                                 {97, 129, 255, 1},
                                                 {95, 1000, 1, 255},
                                                 {193, 65, 7, 9},
                                                 {64, 512, 64, 64},
                                                 {33, 257, 32, 31},
                                                 {49, 255, 33, 33}}) {
    for (const double magnitude : {1e-4, 1.0, 1e4}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, len_q, len_k, dim, dim_v, DType::kBFloat16);
      spec.magnitude_q = magnitude;
      SCOPED_TRACE(Describe(spec));
      const OwnedAttention owned = MakeAttention(spec, seed_);
      Amx(owned);
      ExpectRight(owned);
    }
  }
}

// One key: O is V itself.
TEST_F(CpuFlashAmx, EveryValueOfOneKeySurvives) {
  OwnedAttention owned =
      MakeAttention(MakeSpec(1, 256, 256, 25, 1, 8, 256, DType::kBFloat16), seed_);
  for (int64_t bits = 0; bits < 65536; ++bits) {
    *static_cast<uint16_t*>(owned.V(0, bits / 256, 0, bits % 256)) = static_cast<uint16_t>(bits);
  }
  Amx(owned);
  for (int64_t bits = 0; bits < 65536; ++bits) {
    const float in = Get(owned.attention, owned.V(0, bits / 256, 0, bits % 256));
    const float out = Get(owned.attention, owned.O(0, bits / 256, 7, bits % 256));
    ASSERT_TRUE(std::isnan(in) ? std::isnan(out) : in == out) << in << " became " << out;
  }
}

// Values and weights whose products are below fp32's normal numbers, beside no others.
TEST_F(CpuFlashAmx, SmallValuesAndWeights) {
  for (const float value : {0x1p-130f, 0x1p-126f, 0x1p-120f, 0x1p-100f, 0x1p-60f}) {
    for (const float gap : {0.0f, 10.0f, 45.0f, 80.0f}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 40, 300, 16, 16, DType::kBFloat16);
      spec.problem.has_bias = true;
      spec.bias_per_query = false;
      OwnedAttention owned = MakeAttention(spec, seed_);
      auto* const bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
      for (int64_t j = 0; j < 300; ++j) {
        bias[j] = j % 2 == 0 ? 0 : -gap;
        for (int64_t d = 0; d < 16; ++d) {
          Set(owned.attention, owned.V(0, 0, j, d), j % 2 == 0 ? 0 : value);
        }
      }
      Amx(owned);
      ExpectRight(owned);
    }
  }
}

// Rows of Q that need subnormal numbers, fp32's range or IEEE's rules have cpu_flash's bits, and
// change no other row's.
TEST_F(CpuFlashAmx, UnfitQueriesAreComputedAsCpuFlashDoes) {
  ProblemSpec spec = MakeSpec(1, 4, 2, 90, 300, 40, 48, DType::kBFloat16);
  spec.problem.mask.right = 0;
  OwnedAttention clean = MakeAttention(spec, seed_);
  Amx(clean);
  ExpectRight(clean);
  for (const float value : {0x1p-130f, 0x1p61f, kNan, kInfinity, -kInfinity}) {
    OwnedAttention dirty = MakeAttention(spec, seed_);
    OwnedAttention flash = MakeAttention(spec, seed_);
    for (const int64_t i : {0, 17, 18, 19, 89}) {
      for (OwnedAttention* owned : {&dirty, &flash}) {
        Set(owned->attention, owned->Q(0, 2, i, 5), value);
      }
    }
    Amx(dirty);
    Flash(flash);
    ExpectRight(dirty);
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < 90; ++i) {
        const bool unfit = h == 2 && (i == 0 || i == 89 || (i >= 17 && i <= 19));
        ASSERT_TRUE(SameRow(&dirty, unfit ? &flash : &clean, h, i))
            << h << " " << i << " " << value;
      }
    }
  }
}

// NaN, Inf and large numbers of K and V reach the rows that see them, and no others.
TEST_F(CpuFlashAmx, KeysAndValuesReachTheRowsThatSeeThem) {
  for (const float value : {kNan, kInfinity, -kInfinity, 0x1p100f, 3e38f}) {
    for (const bool of_k : {false, true}) {
      for (const int64_t key : {0, 31, 32, 150, 255, 256, 299}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 300, 300, 40, 48, DType::kBFloat16);
        spec.problem.mask = {Alignment::kBottomRight, 20, 0};  // causal with a window
        OwnedAttention clean = MakeAttention(spec, seed_);
        OwnedAttention dirty = MakeAttention(spec, seed_);
        Set(dirty.attention, of_k ? dirty.K(0, 0, key, 3) : dirty.V(0, 0, key, 5), value);
        Amx(clean);
        Amx(dirty);
        ExpectRight(dirty);
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t i = 0; i < 300; ++i) {
            if (i >= key && i <= key + 20) continue;
            ASSERT_TRUE(SameRow(&dirty, &clean, h, i)) << "row " << i << " felt key " << key;
          }
        }
      }
    }
  }
}

TEST_F(CpuFlashAmx, SpecialsAnywhere) {
  const auto count = static_cast<uint64_t>(400 * TestScale());
  for (uint64_t n = 0; n < count && !HasFailure(); ++n) {
    const ProblemSpec spec = TileSpec(seed_ + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed_ + n);
    SetSpecials(&owned, seed_ + n);
    Amx(owned);
    ExpectRight(owned);
  }
}

// V's NaN and Inf change the columns that they are in, and no others, in tiles too.
TEST_F(CpuFlashAmx, SpecialValuesChangeOnlyTheirColumns) {
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    ProblemSpec spec = MakeSpec(1, 4, 2, 300, 700, 40, 48, DType::kBFloat16);
    spec.problem.mask.right = 0;
    OwnedAttention clean = MakeAttention(spec, seed_);
    OwnedAttention dirty = MakeAttention(spec, seed_);
    for (const int64_t key : {0, 511, 512}) {
      Set(dirty.attention, dirty.V(0, 1, key, key % 3), value);
    }
    Amx(clean);
    Amx(dirty);
    ExpectRight(dirty);
    for (int64_t h = 2; h < 4; ++h) {
      for (int64_t i = 0; i < 300; ++i) {
        const auto o = [&](OwnedAttention* owned) { return owned->O(0, h, i, 3); };
        ASSERT_EQ(std::memcmp(o(&dirty), o(&clean), 45 * 2), 0) << h << " " << i;
        const float felt = Get(dirty.attention, dirty.O(0, h, i, 0));
        ASSERT_TRUE(std::isnan(value) ? std::isnan(felt) : felt == value) << h << " " << i;
      }
    }
  }
}

// A weight that underflows to 0 is no hidden key; -inf of a bias hides V.
TEST_F(CpuFlashAmx, UnlikelyKeysAreSeenAndHiddenOnesAreNot) {
  for (const float bias_of_key : {-500.0f, -kInfinity}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 60, 70, 16, 16, DType::kBFloat16);
    spec.problem.has_bias = true;
    spec.bias_per_query = false;
    OwnedAttention owned = MakeAttention(spec, seed_);
    const_cast<float*>(static_cast<const float*>(owned.attention.bias.data))[33] = bias_of_key;
    Set(owned.attention, owned.V(0, 0, 33, 4), kNan);
    Amx(owned);
    ExpectRight(owned);
    EXPECT_EQ(std::isnan(Get(owned.attention, owned.O(0, 0, 7, 4))), bias_of_key == -500.0f);
    EXPECT_TRUE(std::isfinite(Get(owned.attention, owned.O(0, 0, 7, 5))));
  }
}

TEST_F(CpuFlashAmx, RowsThatSeeNothing) {
  for (const bool sinks : {false, true}) {
    for (const int64_t keys : {0, 200}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 70, keys, 16, 24, DType::kBFloat16);
      spec.problem.has_sinks = sinks;
      spec.problem.has_bias = true;
      spec.bias_masked_share = 1;
      OwnedAttention owned = MakeAttention(spec, seed_);
      Amx(owned);
      for (int64_t i = 0; i < 70; ++i) {
        ASSERT_EQ(Get(owned.attention, owned.O(0, 0, i, 23)), 0.0f);
        ASSERT_FLOAT_EQ(owned.attention.lse[i], sinks ? owned.attention.sinks[0] : -kInfinity);
      }
    }
  }
}

TEST_F(CpuFlashAmx, PagesGiveTheSameBits) {
  constexpr int64_t kPageRows[] = {16, 32, 64, 128};
  for (uint64_t n = 0; n < static_cast<uint64_t>(60 * TestScale()); ++n) {
    ProblemSpec spec =
        MakeSpec(2, 4, 2, 40, 300 + static_cast<int64_t>(n), 40, 24, DType::kBFloat16);
    spec.problem.mask.right = n % 2 == 0 ? 0 : -1;
    ProblemSpec paged = InPages(spec, kPageRows[n % 4]);
    if (n % 3 == 0) paged.page_order = PageOrder::kDescending;
    OwnedAttention dense = MakeAttention(spec, seed_ + n);
    OwnedAttention in_pages = MakeAttention(paged, seed_ + n);
    ASSERT_EQ(Bits(&in_pages), Bits(&dense)) << Describe(paged);
  }
}

TEST_F(CpuFlashAmx, BitsDoNotDependOnNeighboursOrThreads) {
  std::vector<OwnedAttention> all;
  std::vector<const Attention*> batch;
  std::vector<std::vector<std::byte>> alone;
  for (uint64_t n = 0; n < 40; ++n) all.push_back(MakeAttention(TileSpec(seed_ + n), seed_ + n));
  tbb::task_arena one(1);
  for (OwnedAttention& owned : all) {
    batch.push_back(&owned.attention);
    one.execute([&] { alone.push_back(Bits(&owned, batch.size() <= 10 ? Flash : Amx)); });
  }
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 5);
  for (const int threads : {1, 2, 5}) {
    for (OwnedAttention& owned : all) owned.ResetOutput();
    tbb::task_arena arena(threads);
    arena.execute([&] { CpuFlash(batch, {}, 10); });
    for (size_t n = 0; n < all.size(); ++n) {
      ASSERT_EQ(all[n].OutputBytes(), alone[n]) << threads << " threads, problem " << n;
    }
    std::reverse(batch.begin() + 10, batch.end());
  }
}

// The same rows as part of a larger problem, where they share tiles with others, and their first
// tile of keys begins elsewhere.
TEST_F(CpuFlashAmx, BitsOfARowDoNotDependOnTheRowsBesideIt) {
  ProblemSpec spec = MakeSpec(1, 6, 2, 300, 900, 72, 40, DType::kBFloat16);
  spec.problem.mask = {Alignment::kTopLeft, 20, 300};
  OwnedAttention whole = MakeAttention(spec, seed_);
  Amx(whole);
  for (const int64_t few : {9, 50, 97, 200}) {
    OwnedAttention part = MakeAttention(spec, seed_);
    part.attention.problem.len_q = few;  // top-left: the mask does not move
    Amx(part);
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t i = 0; i < few; ++i) ASSERT_TRUE(SameRow(&part, &whole, h, i)) << h << " " << i;
    }
  }
}

// Sequences of few rows have cpu_flash's bits, whatever else the request has.
TEST_F(CpuFlashAmx, FewRowsHaveTheBitsOfCpuFlash) {
  for (const int64_t rows : {1, 5, 12, 13}) {
    // Too few keys to decode more than 4 of them.
    ProblemSpec spec = MakeSpec(2, 4, 2, 60, 200, 64, 64, DType::kBFloat16);
    spec.q_lengths = {rows, 60};
    OwnedAttention amx = MakeAttention(spec, seed_);
    OwnedAttention flash = MakeAttention(spec, seed_);
    Amx(amx);
    Flash(flash);
    ExpectRight(amx);
    bool same = true;
    for (int64_t i = 0; i < rows; ++i) same = same && SameRow(&amx, &flash, 3, i);
    EXPECT_EQ(same, rows * 2 <= kDecodeRows) << rows;
  }
}

// The backward pass, which is cpu_flash's, takes O and LSE of rounded weights.
TEST_F(CpuFlashAmx, GradientsOfItsAnswersAreRight) {
  for (uint64_t n = 0; n < static_cast<uint64_t>(100 * TestScale()); ++n) {
    ProblemSpec spec = TileSpec(seed_ + n);
    if (spec.problem.page_rows > 0 || spec.problem.key_offset + spec.problem.keys_after > 0)
      continue;
    spec.problem.return_lse = true;
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, seed_ + n);
    Amx(owned);
    OwnedGradients gradients(owned.attention, seed_ + n);
    CpuFlashGradients(owned.attention, gradients.get());
    const RowsReport report =
        CheckGradients(owned.attention, gradients.get(), seed_ + n, 1e9, nullptr, false);
    EXPECT_FALSE(report.failed()) << report.detail;
  }
}

TEST(MachinesTiles, GiveTheSameBitsAsTheTwin) {
  if (!cpu_flash::WhyNoAmx().empty()) GTEST_SKIP() << cpu_flash::WhyNoAmx();
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(200 * TestScale()); ++n) {
    const ProblemSpec spec = TileSpec(seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed + n);
    const std::vector<std::byte> machine = Bits(&owned);
    const WithTwinTiles twin;
    ASSERT_EQ(machine, Bits(&owned));
  }
}

}  // namespace
}  // namespace attend::test
