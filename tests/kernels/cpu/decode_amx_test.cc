// SPDX-License-Identifier: Apache-2.0
//
// Decoding in tiles, of 5 to 24 rows of a KV head, against the reference, with the tile unit's
// twin, on machines with AVX-512 and AVX512_BF16; where the machine has AMX, its answers are the
// twin's bit for bit.

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/contract/decode_rule.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/problems.h"
#include "tests/kernels/support/tile_twin.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::byte> Bits(OwnedAttention* owned, bool amx = true) {
  owned->ResetOutput();
  const Attention* batch[] = {&owned->attention};
  CpuFlash(batch, {}, amx ? 0 : 1);
  return owned->OutputBytes();
}

void ExpectRight(const OwnedAttention& owned) {
  const RowsReport report = CheckAllRows(owned.attention, /*weights_rounded=*/true);
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_TRUE(owned.GuardsIntact()) << "wrote outside its rows";
}

bool SameRow(OwnedAttention* x, OwnedAttention* y, int64_t h, int64_t i) {
  const auto bytes = static_cast<size_t>(x->attention.problem.dim_v) * sizeof(uint16_t);
  return std::memcmp(x->O(0, h, i, 0), y->O(0, h, i, 0), bytes) == 0;
}

// Any problem of bf16 and few rows, with head dimensions that tiles take.
ProblemSpec DecodeSpec(uint64_t seed) {
  ProblemSpec spec;
  for (uint64_t at = seed;; at += 1000003) {
    spec = RandomKernelSpec(at, 1e6);
    const int64_t rows = spec.problem.len_q * spec.problem.group();
    if (rows > kDecodeRowsAlways && rows <= kDecodeRows && spec.problem.len_k >= 60) break;
  }
  Problem& p = spec.problem;
  p.dtype = DType::kBFloat16;
  p.o_float32 = false;
  p.dim = cpu_flash::WholeBlocks(p.dim);
  p.dim_v = cpu_flash::WholeBlocks(p.dim_v);
  if (p.has_bias) SetBias(spec.bias_dtype, &p);
  return spec;
}

using DecodeAmx = AmxTest;

TEST_F(DecodeAmx, RandomProblems) {
  const auto count = static_cast<uint64_t>(200 * TestScale());
  for (uint64_t n = 0; n < count && !HasFailure(); ++n) {
    const ProblemSpec spec = DecodeSpec(seed_ + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_ + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed_ + n);
    Bits(&owned);
    ExpectRight(owned);
  }
}

TEST_F(DecodeAmx, EveryNumberOfRows) {
  for (int64_t rows = 1; rows <= kDecodeRows; ++rows) {
    OwnedAttention owned =
        MakeAttention(MakeSpec(1, rows, 1, 1, 1100, 64, 96, DType::kBFloat16), seed_);
    const std::vector<std::byte> amx = Bits(&owned);
    ExpectRight(owned);
    EXPECT_EQ(amx == Bits(&owned, false), rows <= kDecodeRowsAlways) << rows;
  }
}

// Numbers that tiles cannot take reach the rows that see them, and no others.
TEST_F(DecodeAmx, SpecialsReachOnlyTheRowsThatSeeThem) {
  for (const float value : {0x1p-130f, 0x1p61f, 0x1p100f, kNan, kInfinity, -kInfinity}) {
    for (const int place : {0, 1, 2}) {
      ProblemSpec spec = MakeSpec(1, 4, 2, 4, 500, 32, 64, DType::kBFloat16);
      spec.problem.mask = {Alignment::kBottomRight, -1, 0};
      OwnedAttention clean = MakeAttention(spec, seed_);
      OwnedAttention dirty = MakeAttention(spec, seed_);
      // The key before the last is not seen by the first two rows.
      void* const at[] = {dirty.Q(0, 2, 1, 3), dirty.K(0, 1, 498, 3), dirty.V(0, 1, 498, 3)};
      Set(dirty.attention, at[place], value);
      Bits(&clean);
      Bits(&dirty);
      ExpectRight(dirty);
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 4; ++i) {
          const bool felt = place == 0 ? h == 2 && i == 1 : h >= 2 && i >= 2;
          if (felt) continue;
          ASSERT_TRUE(SameRow(&dirty, &clean, h, i)) << value << " in "
                                                     << "QKV"[place];
        }
      }
    }
  }
}

// Values and weights whose products are below fp32's normal numbers, beside no others.
TEST_F(DecodeAmx, SmallValuesAndWeights) {
  for (const float value : {0x1p-130f, 0x1p-126f, 0x1p-120f, 0x1p-60f}) {
    for (const float gap : {0.0f, 10.0f, 45.0f, 80.0f}) {
      ProblemSpec spec = MakeSpec(1, 8, 1, 1, 600, 32, 32, DType::kBFloat16);
      spec.problem.has_bias = true;
      spec.bias_per_query = spec.bias_per_head = false;
      OwnedAttention owned = MakeAttention(spec, seed_);
      auto* const bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
      for (int64_t j = 0; j < 600; ++j) {
        bias[j] = j % 2 == 0 ? 0 : -gap;
        for (int64_t d = 0; d < 32; ++d) {
          Set(owned.attention, owned.V(0, 0, j, d), j % 2 == 0 ? 0 : value);
        }
      }
      Bits(&owned);
      ExpectRight(owned);
    }
  }
}

TEST_F(DecodeAmx, PagesGiveTheSameBits) {
  for (const int64_t page_rows : {16, 32, 64}) {
    for (const int64_t keys : {300, 321, 512}) {
      const ProblemSpec spec = MakeSpec(2, 8, 1, 1, keys, 64, 64, DType::kBFloat16);
      ProblemSpec paged = InPages(spec, page_rows);
      OwnedAttention dense = MakeAttention(spec, seed_);
      OwnedAttention in_pages = MakeAttention(paged, seed_);
      ASSERT_EQ(Bits(&in_pages), Bits(&dense)) << Describe(paged);
    }
  }
}

TEST_F(DecodeAmx, BitsDoNotDependOnThreads) {
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 5);
  OwnedAttention owned =
      MakeAttention(MakeSpec(2, 16, 2, 2, 3000, 64, 32, DType::kBFloat16), seed_);
  tbb::task_arena one(1), many(5);
  std::vector<std::byte> alone;
  one.execute([&] { alone = Bits(&owned); });
  for (int n = 0; n < 5; ++n) {
    many.execute([&] { ASSERT_EQ(Bits(&owned), alone); });
  }
}

TEST(MachinesTilesDecode, GiveTheSameBitsAsTheTwin) {
  if (!cpu_flash::WhyNoAmx().empty()) GTEST_SKIP() << cpu_flash::WhyNoAmx();
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(100 * TestScale()); ++n) {
    const ProblemSpec spec = DecodeSpec(seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed + n);
    const std::vector<std::byte> machine = Bits(&owned);
    const WithTwinTiles twin;
    ASSERT_EQ(machine, Bits(&owned));
  }
}

}  // namespace
}  // namespace attend::test
