// SPDX-License-Identifier: Apache-2.0
//
// cpu_flash's decoding path: few query rows, keys in splits. Compared with the reference for every
// instruction set, and its guarantees: bits depend only on the problem, and unseen keys have no
// effect.

#include "kernels/cpu/decode.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr int64_t kPageRows[] = {16, 64, 128, 1024};
// Key counts around the edges of vectors, tiles, splits, and splits that had to grow.
constexpr int64_t kLengths[] = {1,   2,   15,  16,   17,   63,   64,    65,    100,
                                511, 512, 513, 1023, 1024, 1500, 32767, 32768, 33000};

void Flash(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
}

std::vector<std::byte> BitsAlone(OwnedAttention* owned) {
  owned->ResetOutput();
  Flash(*owned);
  return owned->OutputBytes();
}

void ExpectAllRowsRight(const OwnedAttention& owned) {
  const RowsReport report = CheckAllRows(owned.attention, false);  // weights stay in fp32
  EXPECT_TRUE(report.ok) << report.detail;
  EXPECT_TRUE(owned.GuardsIntact()) << "wrote outside its rows";
}

// Rows per KV head as given, everything else drawn from the seed. Many keys come with short rows.
ProblemSpec DecodeSpec(int64_t group, int64_t len_q, uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto pick = [&](const auto& values) { return values[engine() % std::size(values)]; };
  const auto chance = [&](uint64_t percent) { return engine() % 100 < percent; };
  constexpr int64_t kDims[] = {1, 7, 16, 17, 31, 32, 33, 64, 80, 127, 128, 255, 256};
  const int64_t rows = group * len_q;
  int64_t keys = pick(kLengths);
  if (rows > kDecodeRows || (keys > 2000 && !chance(20))) keys %= 200;
  const int64_t dim = keys > 2000 ? 8 : pick(kDims);
  ProblemSpec spec = MakeSpec(1, group, 1, len_q, keys, dim,
                              chance(50) || keys > 2000 ? dim : pick(kDims), pick(kDTypes));
  Problem& p = spec.problem;
  p.mask.alignment = chance(50) ? Alignment::kBottomRight : Alignment::kTopLeft;
  if (chance(60)) p.mask.right = chance(50) ? 0 : static_cast<int64_t>(engine() % 70);
  if (chance(40)) p.mask.left = static_cast<int64_t>(engine() % (keys + 3));
  if (chance(15)) p.softcap = 5;
  p.has_bias = chance(15);
  spec.bias_masked_share = chance(50) ? 0.3 : 0;
  p.has_alibi = chance(15);
  p.has_sinks = chance(30);
  if (chance(20)) p.scale = chance(50) ? 1.0f : -0.3f;
  constexpr Layout kLayouts[] = {Layout::kBHLD, Layout::kBLHD, Layout::kStrided};
  spec.layout = pick(kLayouts);
  spec.misaligned_elements = chance(50) ? 0 : static_cast<int64_t>(engine() % 8);
  return spec;
}

TEST(CpuDecode, EveryGroupAndQueryLengthIsRightOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const double share = std::min(1.0, TestScale());
  ForEachTarget([&] {
    uint64_t n = seed;
    for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64}) {
      for (int64_t len_q = 1; len_q <= 17; ++len_q) {
        const bool decodes = group * len_q <= kDecodeRows;
        if (++n % 100 >= static_cast<uint64_t>((decodes ? 100 : 30) * share)) continue;
        const ProblemSpec spec = DecodeSpec(group, len_q, n);
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        OwnedAttention owned = MakeAttention(spec, n);
        const std::vector<std::byte> dense = BitsAlone(&owned);
        ExpectAllRowsRight(owned);
        OwnedAttention paged = MakeAttention(InPages(spec, kPageRows[n % 4]), n);
        ASSERT_EQ(BitsAlone(&paged), dense) << "in pages of " << kPageRows[n % 4];
      }
    }
  });
}

TEST(CpuDecode, LengthsAroundEveryEdgeAreRight) {
  const uint64_t seed = FreshSeed();
  ForEachTarget([&] {
    for (const int64_t keys : kLengths) {
      for (const DType dtype : kDTypes) {
        ProblemSpec spec = MakeSpec(1, 3, 1, 2, keys, 12, 40, dtype);
        spec.problem.mask.right = 0;
        spec.problem.has_sinks = keys % 2 == 0;
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        const OwnedAttention owned = MakeAttention(spec, seed);
        Flash(owned);
        ExpectAllRowsRight(owned);
      }
    }
  });
}

// Splits and pages that no row sees, windows that begin and end within one. Unseen keys hold NaN,
// which must not affect any row, not even its rounding.
TEST(CpuDecode, WindowsAnywhereAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t left : {0, 1, 63, 64, 700, 1500}) {
    for (const int64_t after : {0, 5, 900}) {
      for (const bool sinks : {false, true}) {
        ProblemSpec spec = MakeSpec(2, 4, 2, 3, 2500, 64, 64, DType::kBFloat16);
        Problem& p = spec.problem;
        p.mask = {Alignment::kBottomRight, left, 0};
        p.keys_after = after;  // the window lies after the keys, or across their end
        p.has_sinks = sinks;
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        OwnedAttention clean = MakeAttention(InPages(spec, 128), seed);
        OwnedAttention dirty = MakeAttention(InPages(spec, 128), seed);
        const Sequence s = SequenceOf(dirty.attention, 0);
        const KeyRange seen = SeenKeys(p, s);
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t j = 0; j < p.len_k; ++j) {
            if (j >= seen.begin && j < seen.end) continue;
            Set(dirty.attention, dirty.K(b, 1, j, 3), kNan);
            Set(dirty.attention, dirty.V(b, 1, j, 5), j % 2 == 0 ? kNan : kInfinity);
          }
        }
        EXPECT_EQ(BitsAlone(&dirty), BitsAlone(&clean));
        ExpectAllRowsRight(clean);
      }
    }
  }
}

// A key that only some rows see, and a query that is NaN: the other rows keep their bits.
TEST(CpuDecode, KeysThatOtherRowsSeeDoNotChangeARow) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 5, 1200, 40, 48, dtype);
      spec.problem.mask.right = 0;  // row i sees keys up to 1195 + i
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
      OwnedAttention clean = MakeAttention(spec, seed);
      OwnedAttention dirty = MakeAttention(spec, seed);
      Set(dirty.attention, dirty.K(0, 0, 1198, 3), poison);
      Set(dirty.attention, dirty.V(0, 0, 1198, 5), poison);
      Set(dirty.attention, dirty.Q(0, 1, 1, 7), kNan);
      Flash(clean);
      Flash(dirty);
      ExpectAllRowsRight(dirty);
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 5; ++i) {
          for (int64_t d = 0; d < 48; ++d) {
            const float got = Get(dirty.attention, dirty.O(0, h, i, d));
            if (h == 1 && i == 1) {
              ASSERT_TRUE(std::isnan(got));
            } else if (i < 3) {
              ASSERT_EQ(got, Get(clean.attention, clean.O(0, h, i, d))) << h << " " << i;
            }
          }
        }
      }
    }
  }
}

// A row that a NaN reaches has the same bits whatever other rows and the keys hidden from it hold.
TEST(CpuDecode, HiddenKeysDoNotChangeARowWithANan) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t dim : {40, 64}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 4, 1200, dim, 64, dtype);
      spec.problem.mask.right = 0;  // row i sees keys up to 1196 + i
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
      const auto row_0 = [&](int of, float value) {
        OwnedAttention owned = MakeAttention(spec, seed);
        Set(owned.attention, owned.V(0, 0, 1100, 5), kNan);
        void* const at[] = {nullptr, owned.Q(0, 1, 3, 2), owned.K(0, 0, 1199, 2),
                            owned.V(0, 0, 1199, 2)};
        if (of > 0) Set(owned.attention, at[of], value);
        Flash(owned);
        ExpectAllRowsRight(owned);
        std::vector<float> row;
        for (int64_t d = 0; d < 64; ++d) row.push_back(Get(owned.attention, owned.O(0, 0, 0, d)));
        EXPECT_TRUE(std::isnan(row[5]));
        row[5] = 0;
        return row;
      };
      const std::vector<float> wanted = row_0(0, 0);
      for (const int of : {1, 2, 3}) {
        for (const float value : {0x1p59f, kNan, kInfinity}) EXPECT_EQ(row_0(of, value), wanted);
      }
    }
  }
}

// Any problem, decoded or not.
TEST(CpuDecode, SpecialsAnywhereAreRightOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(200 * TestScale());
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      const auto rows = static_cast<int64_t>(n % 5);
      const ProblemSpec spec =
          rows == 0 ? RandomKernelSpec(seed + n, 5e5) : DecodeSpec(1 + rows % 3, rows, seed + n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
      OwnedAttention owned = MakeAttention(spec, seed + n);
      SetSpecials(&owned, seed + n);
      Flash(owned);
      ExpectAllRowsRight(owned);
    }
  });
}

TEST(CpuDecode, OverflowingSumsAndNonFiniteValuesAreRight) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const float value : {kMost, -kMost, 3e38f}) {
    OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 2, 1500, 24, 40), FreshSeed());
    for (int64_t j = 0; j < 1500; ++j) Set(owned.attention, owned.V(0, 0, j, 33), value);
    Flash(owned);
    ExpectAllRowsRight(owned);
    EXPECT_NEAR(Get(owned.attention, owned.O(0, 1, 1, 33)) / value, 1, 1e-5);
  }
  // Inf at a key whose weight underflows, in another split than the dominant key.
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 1500, 8, 8), FreshSeed());
  for (int64_t d = 0; d < 8; ++d) {
    Set(owned.attention, owned.Q(0, 0, 0, d), 30);
    Set(owned.attention, owned.K(0, 0, 1400, d), 30);
    Set(owned.attention, owned.K(0, 0, 7, d), -30);
  }
  Set(owned.attention, owned.V(0, 0, 7, 2), kInfinity);
  Flash(owned);
  ExpectAllRowsRight(owned);
  EXPECT_EQ(Get(owned.attention, owned.O(0, 0, 0, 2)), kInfinity);
  EXPECT_TRUE(std::isfinite(Get(owned.attention, owned.O(0, 0, 0, 3))));
}

// Two sequences on the same pages, in descending order, among unused pages.
TEST(CpuDecode, PagesMayBeSharedAndInAnyOrder) {
  constexpr int64_t kRows = 32, kPages = 40, kKeys = 700, kDim = 64;
  const uint64_t seed = FreshSeed();
  ProblemSpec spec = MakeSpec(2, 4, 2, 1, kKeys, kDim, kDim, DType::kFloat16);
  OwnedAttention dense = MakeAttention(spec, seed);
  Attention& a = dense.attention;
  const int64_t count = (kKeys + kRows - 1) / kRows;
  std::vector<uint16_t> k(2 * kPages * kRows * kDim, 0x7e00), v = k;  // NaN
  std::vector<int32_t> table(static_cast<size_t>(2 * count));
  for (int64_t n = 0; n < count; ++n) {
    table[static_cast<size_t>(n)] = table[static_cast<size_t>(count + n)] =
        static_cast<int32_t>(kPages - 1 - n);
  }
  Attention paged = a;
  paged.problem.page_rows = kRows;
  paged.kv_pages = {table.data(), count};
  for (ConstTensorView* view : {&paged.k, &paged.v}) {
    view->data = view == &paged.k ? k.data() : v.data();
    view->stride_b = 2 * kRows * kDim;
    view->stride_h = kRows * kDim;
    view->stride_l = kDim;
  }
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < kKeys; ++j) {
      const auto at =
          static_cast<size_t>(((kPages - 1 - j / kRows) * 2 + h) * kRows * kDim + j % kRows * kDim);
      for (int64_t d = 0; d < kDim; ++d) {
        k[at + static_cast<size_t>(d)] = *static_cast<uint16_t*>(dense.K(0, h, j, d));
        v[at + static_cast<size_t>(d)] = *static_cast<uint16_t*>(dense.V(0, h, j, d));
        Set(a, dense.K(1, h, j, d), Get(a, dense.K(0, h, j, d)));
        Set(a, dense.V(1, h, j, d), Get(a, dense.V(0, h, j, d)));
      }
    }
  }
  const std::vector<std::byte> expected = BitsAlone(&dense);
  ExpectAllRowsRight(dense);
  dense.ResetOutput();
  const Attention* batch[] = {&paged};
  CpuFlash(batch);
  EXPECT_EQ(dense.OutputBytes(), expected);
}

// Alone, in a batch with others, on one thread and on more threads than cores.
TEST(CpuDecode, BitsDoNotDependOnNeighboursOrThreads) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::vector<OwnedAttention> all;
  std::vector<const Attention*> batch;
  std::vector<std::vector<std::byte>> alone;
  std::mt19937_64 engine(seed);
  for (uint64_t n = 0; n < static_cast<uint64_t>(20 + 40 * TestScale()); ++n) {
    const auto group = static_cast<int64_t>(1 + engine() % 6);
    ProblemSpec spec =
        MakeSpec(1 + n % 3, 2 * group, 2, 1 + n % 4, 1 + engine() % 4000, 32, 24, kDTypes[n % 3]);
    if (n % 2 == 0) spec.problem.mask.right = 0;
    if (n % 5 == 0) spec.problem.mask.left = static_cast<int64_t>(engine() % 2000);
    all.push_back(MakeAttention(n % 4 == 0 ? InPages(spec, 64) : spec, seed + n));
  }
  tbb::task_arena one(1);
  for (OwnedAttention& owned : all) {
    batch.push_back(&owned.attention);
    one.execute([&] { alone.push_back(BitsAlone(&owned)); });
  }
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 5);
  for (const int threads : {1, 2, 5}) {
    for (OwnedAttention& owned : all) owned.ResetOutput();
    tbb::task_arena arena(threads);
    arena.execute([&] { CpuFlash(batch); });
    for (size_t n = 0; n < all.size(); ++n) {
      ASSERT_EQ(all[n].OutputBytes(), alone[n]) << threads << " threads, problem " << n;
    }
    for (size_t n = 0; n < all.size(); ++n) {
      arena.execute([&] { ASSERT_EQ(BitsAlone(&all[n]), alone[n]) << threads << " threads"; });
    }
    std::reverse(batch.begin(), batch.end());
  }
}

// The same rows among more of them.
TEST(CpuDecode, BitsOfARowDoNotDependOnTheRowsBesideIt) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 4, 2, 12, 3000, 72, 40, DType::kBFloat16);
  spec.problem.mask = {Alignment::kTopLeft, -1, 2000};
  OwnedAttention whole = MakeAttention(spec, seed);
  Flash(whole);
  for (const int64_t rows : {1, 2, 3, 5, 8, 11}) {
    OwnedAttention part = MakeAttention(spec, seed);
    part.attention.problem.len_q = rows;  // top-left: the mask does not move
    Flash(part);
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t d = 0; d < 40; ++d) {
          ASSERT_EQ(Get(part.attention, part.O(0, h, i, d)),
                    Get(whole.attention, whole.O(0, h, i, d)));
        }
      }
    }
  }
}

// Rows within the length are decoded; the padding beside them is still written.
TEST(CpuDecode, PaddedRowsAreWritten) {
  for (const int64_t padded : {2, 16, 200, 500}) {
    ProblemSpec spec = MakeSpec(4, 6, 2, padded, 900, 32, 32);
    spec.q_lengths = {1, 0, 2, padded};
    spec.kv_lengths = {900, 3, 0, 600};
    spec.problem.mask.right = 0;
    spec.problem.has_sinks = true;
    SCOPED_TRACE(Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, FreshSeed());
    Flash(owned);
    ExpectAllRowsRight(owned);
  }
}

}  // namespace
}  // namespace attend::test
