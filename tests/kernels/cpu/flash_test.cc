// SPDX-License-Identifier: Apache-2.0
//
// cpu_flash compared with the reference, for every instruction set of this machine, and its
// guarantees besides accuracy: bits depend only on the problem, and unseen keys have no effect.

#include "kernels/cpu/flash.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

TEST(CpuFlash, RandomProblemsOnEveryTarget) {
  const uint64_t seed = FreshSeed();
  const uint64_t count = static_cast<uint64_t>(800 * TestScale());
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = RandomKernelSpec(seed + n);
      if (n % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
      const OwnedAttention owned = MakeAttention(spec, seed + n);
      Flash(owned);
      ExpectAllRowsRight(owned);
    }
  });
}

// The sweep above proves something only if it covers every feature.
TEST(CpuFlash, TheSweepCoversEveryFeature) {
  int packed = 0, bias = 0, bits = 0, alibi = 0, sinks = 0, softcap = 0, window = 0, causal = 0,
      top_left = 0;
  int q_lengths = 0, strided = 0, group5 = 0, dv = 0, empty = 0, all = 0;
  int paged = 0, descending = 0, shared = 0, offset = 0, after = 0;
  int dropped = 0, dropped_capped = 0, dropped_packed = 0, dropped_windows = 0, dropped_parts = 0;
  for (uint64_t n = 0; n < 3000; ++n) {
    ProblemSpec spec = RandomKernelSpec(1000 + n);
    if (n % 3 == 1) spec = WithDropout(std::move(spec), 1000 + n);
    const Problem& p = spec.problem;
    packed += p.packed;
    bias += p.has_bias;
    bits += p.has_bias && spec.bias_dtype == DType::kBit;
    alibi += p.has_alibi;
    sinks += p.has_sinks;
    softcap += p.softcap > 0;
    window += p.mask.left >= 0;
    causal += p.mask.right == 0;
    top_left += p.mask.alignment == Alignment::kTopLeft && !p.mask.unrestricted();
    q_lengths += !p.packed && !spec.q_lengths.empty();
    strided += spec.layout == Layout::kStrided;
    group5 += p.group() == 5;
    dv += p.dim != p.dim_v;
    empty += p.len_k == 0 || p.len_q == 0;
    paged += p.page_rows > 0;
    descending += p.page_rows > 0 && spec.page_order == PageOrder::kDescending;
    shared += p.page_rows > 0 && spec.page_order == PageOrder::kShared && p.batch > 1;
    offset += p.key_offset > 0 && p.has_alibi && p.mask.right == 0;
    after += p.keys_after > 0 && p.mask.alignment == Alignment::kBottomRight;
    dropped += p.dropout > 0;
    dropped_capped += p.dropout > 0 && p.softcap > 0 && p.has_sinks;
    dropped_packed += p.dropout > 0 && p.packed && p.has_bias;
    dropped_windows += p.dropout > 0 && p.mask.left >= 0 && !spec.kv_lengths.empty();
    dropped_parts += p.dropout > 0 && p.key_offset % 16 != 0 && spec.dropout.row % 16 != 0;
    all += p.has_bias && p.has_alibi && p.has_sinks && p.softcap > 0;
  }
  for (const int count :
       {packed,       bias,   bits,     alibi,          sinks,          softcap,
        window,       causal, top_left, q_lengths,      strided,        group5,
        dv,           empty,  all,      paged,          descending,     shared,
        offset,       after,  dropped,  dropped_capped, dropped_packed, dropped_windows,
        dropped_parts}) {
    EXPECT_GE(count, 3);
  }
}

// More than 16 bits can count, dense and in pages.
TEST(CpuFlash, ManySequencesAreRight) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const ProblemSpec& spec : {MakeSpec(65537, 1, 1, 1, 3, 4, 2, DType::kFloat16),
                                  InPages(MakeSpec(65537, 2, 1, 1, 17, 1, 1), 16)}) {
    const OwnedAttention owned = MakeAttention(spec, seed);
    Flash(owned);
    ExpectAllRowsRight(owned);
  }
}

// One key: O is V itself, so every 16-bit value must pass through the kernel unchanged.
TEST(CpuFlash, EveryHalfAndBFloat16SurvivesOnEveryTarget) {
  ForEachTarget([] {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      OwnedAttention owned = MakeAttention(MakeSpec(1, 256, 256, 1, 1, 8, 256, dtype), 1);
      for (int64_t bits = 0; bits < 65536; ++bits) {
        *static_cast<uint16_t*>(owned.V(0, bits / 256, 0, bits % 256)) =
            static_cast<uint16_t>(bits);
      }
      Flash(owned);
      for (int64_t bits = 0; bits < 65536; ++bits) {
        const float in = Get(owned.attention, owned.V(0, bits / 256, 0, bits % 256));
        const float out = Get(owned.attention, owned.O(0, bits / 256, 0, bits % 256));
        ASSERT_TRUE(std::isnan(in) ? std::isnan(out) : in == out)
            << DTypeName(dtype) << " " << bits << ": " << in << " became " << out;
      }
    }
  });
}

TEST(CpuFlash, HardShapesAreRightInEveryDType) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const DType dtype : kDTypes) {
    for (const auto& [len_q, len_k, dim, dim_v] : {std::tuple{1, 1, 1, 1},
                                                   {1, 300, 1, 1},
                                                   {300, 1, 256, 256},
                                                   {97, 129, 255, 1},
                                                   {95, 1000, 1, 255},
                                                   {193, 65, 7, 9},
                                                   {16, 16, 64, 64}}) {
      for (const double magnitude : {1e-4, 1.0, 1e4}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, len_q, len_k, dim, dim_v, dtype);
        spec.magnitude_q = magnitude;
        SCOPED_TRACE(Describe(spec));
        const OwnedAttention owned = MakeAttention(spec, seed);
        Flash(owned);
        ExpectAllRowsRight(owned);
      }
    }
  }
}

// Scores of 1e4 and more, with signs that make them rise or fall along rows: the running maximum
// changes at every key tile.
TEST(CpuFlash, ARunningMaximumThatKeepsChangingIsRight) {
  for (const float step : {40.0f, -40.0f, 1e4f}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 20, 500, 4, 4);
    spec.problem.has_bias = true;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    float* bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = 0; j < 500; ++j) {
        bias[i * owned.attention.bias.stride_q + j] = step * static_cast<float>(j - 250);
      }
    }
    Flash(owned);
    ExpectAllRowsRight(owned);
  }
}

TEST(CpuFlash, ALongSequenceIsRight) {
  ProblemSpec spec = MakeSpec(1, 2, 1, 3, 131072, 16, 16);
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  Flash(owned);
  ExpectAllRowsRight(owned);
}

TEST(CpuFlash, ExtremeScalesAreRight) {
  for (const float scale : {0.0f, 1e-30f, -1.0f, 5.0f, 1e30f, -1e30f}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 33, 65, 8, 8);
    spec.problem.scale = scale;
    const OwnedAttention owned = MakeAttention(spec, FreshSeed());
    Flash(owned);
    SCOPED_TRACE(scale);
    ExpectAllRowsRight(owned);
  }
}

TEST(CpuFlash, RowsThatSeeNoKeyAreZero) {
  const auto expect_zero = [](const ProblemSpec& spec) {
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    Flash(owned);
    for (int64_t i = 0; i < spec.problem.len_q; ++i) {
      for (int64_t d = 0; d < spec.problem.dim_v; ++d) {
        ASSERT_EQ(Get(owned.attention, owned.O(0, 0, i, d)), 0.0f) << Describe(spec);
      }
      const float lse = spec.problem.has_sinks ? owned.attention.sinks[0] : -kInfinity;
      ASSERT_FLOAT_EQ(owned.attention.lse[i], lse) << Describe(spec);
    }
  };
  for (const bool sinks : {false, true}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 70, 0, 16, 24);  // no keys
    spec.problem.has_sinks = sinks;
    expect_zero(spec);
    spec = MakeSpec(1, 1, 1, 70, 200, 16, 24);  // all masked by bias
    spec.problem.has_sinks = sinks;
    spec.problem.has_bias = true;
    spec.bias_masked_share = 1;
    expect_zero(spec);
    spec = MakeSpec(1, 1, 1, 70, 200, 16, 24);  // a true length of 0; K and V hold NaN
    spec.problem.has_sinks = sinks;
    spec.kv_lengths = {0};
    expect_zero(spec);
  }
}

TEST(CpuFlash, EmptyProblemsAreDone) {
  CpuFlash({});
  EXPECT_TRUE(CpuFlashRunsInline({}));
  for (const ProblemSpec& spec : {MakeSpec(0, 2, 1, 5, 5, 8, 8), MakeSpec(2, 2, 1, 0, 5, 8, 8)}) {
    const OwnedAttention owned = MakeAttention(spec, 1);
    Flash(owned);
    EXPECT_TRUE(owned.GuardsIntact());
  }
}

TEST(CpuFlash, UnseenKeysHaveNoEffect) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : kDTypes) {
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      for (const int64_t key : {1, 63, 64, 150, 199}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, 200, 200, 40, 48, dtype);
        spec.problem.mask = {Alignment::kBottomRight, 20, 0};  // causal with a window
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + Describe(spec));
        OwnedAttention clean = MakeAttention(spec, seed);
        OwnedAttention dirty = MakeAttention(spec, seed);
        Set(dirty.attention, dirty.K(0, 0, key, 3), poison);
        Set(dirty.attention, dirty.V(0, 0, key, 5), poison);
        Flash(clean);
        Flash(dirty);
        ExpectAllRowsRight(dirty);
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t i = 0; i < 200; ++i) {
            if (i >= key && i <= key + 20) continue;
            for (int64_t d = 0; d < 48; ++d) {
              ASSERT_EQ(Get(dirty.attention, dirty.O(0, h, i, d)),
                        Get(clean.attention, clean.O(0, h, i, d)))
                  << "row " << i << " felt key " << key;
            }
          }
        }
      }
    }
  }
}

TEST(CpuFlash, KeysMaskedByBiasHaveNoEffect) {
  for (const float poison : {kNan, kInfinity}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 100, 130, 16, 16);
    spec.problem.has_bias = true;
    spec.bias_per_query = false;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    float* bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
    bias[77] = -kInfinity;
    for (int64_t d = 0; d < 16; ++d) Set(owned.attention, owned.V(0, 0, 77, d), poison);
    Flash(owned);
    ExpectAllRowsRight(owned);
    EXPECT_TRUE(std::isfinite(Get(owned.attention, owned.O(0, 0, 50, 3))));
  }
}

// A key whose weight underflows to 0 is not hidden: its Inf must have the effect that IEEE
// prescribes.
TEST(CpuFlash, AnUnlikelyKeyIsStillSeen) {
  for (const auto& [poison, sink] :
       {std::pair{kNan, false}, {kInfinity, false}, {-kInfinity, true}}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 20, 70, 16, 16);
    spec.problem.has_bias = true;
    spec.problem.has_sinks = sink;
    spec.bias_per_query = false;
    OwnedAttention owned = MakeAttention(spec, FreshSeed());
    if (sink) const_cast<float*>(owned.attention.sinks)[0] = 300;  // as do all weights beside it
    float* bias = const_cast<float*>(static_cast<const float*>(owned.attention.bias.data));
    bias[33] = -500.0f;
    Set(owned.attention, owned.V(0, 0, 33, 4), poison);
    Flash(owned);
    ExpectAllRowsRight(owned);
    const float felt = Get(owned.attention, owned.O(0, 0, 7, 4));
    EXPECT_TRUE(std::isnan(poison) ? std::isnan(felt) : felt == poison) << felt;
    EXPECT_TRUE(std::isfinite(Get(owned.attention, owned.O(0, 0, 7, 5))));
  }
}

TEST(CpuFlash, NanAndInfinityInQueriesStayInTheirRows) {
  for (const float poison : {kNan, kInfinity}) {
    OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 120, 90, 16, 16), FreshSeed());
    Set(owned.attention, owned.Q(0, 0, 70, 2), poison);
    Flash(owned);
    ExpectAllRowsRight(owned);
    EXPECT_TRUE(std::isnan(Get(owned.attention, owned.O(0, 0, 70, 0))));
    EXPECT_TRUE(std::isfinite(Get(owned.attention, owned.O(0, 0, 71, 0))));
  }
}

TEST(CpuFlash, BitsDoNotDependOnNeighboursOrThreads) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::vector<OwnedAttention> all;
  std::vector<const Attention*> batch;
  std::vector<std::vector<std::byte>> alone;
  for (uint64_t n = 0; n < 80; ++n) {
    ProblemSpec spec = RandomKernelSpec(seed + n, 2e7);
    if (n % 3 == 1) spec = WithDropout(std::move(spec), seed + n);
    all.push_back(MakeAttention(spec, seed + n));
  }
  tbb::task_arena one(1);
  for (OwnedAttention& owned : all) {
    batch.push_back(&owned.attention);
    one.execute([&] { alone.push_back(BitsAlone(&owned)); });
  }
  EXPECT_FALSE(CpuFlashRunsInline(batch));
  // More threads than cores, so that they interleave in every order.
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 5);
  for (const int threads : {1, 2, 5}) {
    for (OwnedAttention& owned : all) owned.ResetOutput();
    tbb::task_arena arena(threads);
    arena.execute([&] { CpuFlash(batch); });
    for (size_t n = 0; n < all.size(); ++n) {
      ASSERT_EQ(all[n].OutputBytes(), alone[n]) << threads << " threads, problem " << n;
    }
    std::reverse(batch.begin(), batch.end());
  }
}

// The same rows as part of a larger problem, where they share tiles with others. Decoded rows
// (decode.h) take another path, with a similar test of its own.
TEST(CpuFlash, BitsOfARowDoNotDependOnTheRowsBesideIt) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(1, 6, 2, 300, 400, 72, 40);
  spec.problem.mask = {Alignment::kTopLeft, 150, 30};
  const auto rows_of = [&](int64_t rows) {
    OwnedAttention part = MakeAttention(spec, seed);
    part.attention.problem.len_q = rows;  // top-left: the mask does not move
    Flash(part);
    return part;
  };
  for (const auto& [few, many] :
       {std::pair<int64_t, int64_t>{2, 300}, {5, 300}, {50, 300}, {97, 300}}) {
    OwnedAttention part = rows_of(few);
    OwnedAttention whole = rows_of(many);
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t i = 0; i < few; ++i) {
        for (int64_t d = 0; d < 40; ++d) {
          ASSERT_EQ(Get(part.attention, part.O(0, h, i, d)),
                    Get(whole.attention, whole.O(0, h, i, d)));
        }
      }
    }
  }
}

TEST(CpuFlash, AThousandRepeatsGiveTheSameBits) {
  const uint64_t seed = FreshSeed();
  const int repeats = static_cast<int>(1000 * TestScale());
  tbb::task_arena arena(2);
  ProblemSpec causal = MakeSpec(1, 4, 2, 130, 190, 33, 17);
  causal.problem.mask.right = 0;
  for (const ProblemSpec& spec : {MakeSpec(1, 1, 1, 16, 16, 64, 64), causal}) {
    OwnedAttention owned = MakeAttention(spec, seed);
    const std::vector<std::byte> first = BitsAlone(&owned);
    for (int n = 0; n < repeats; ++n) {
      std::vector<std::byte> again;
      arena.execute([&] { again = BitsAlone(&owned); });
      ASSERT_EQ(again, first) << "ATTEND_TEST_SEED=" << seed << " repeat " << n;
    }
  }
}

TEST(CpuFlash, SmallBatchesRunInlineAndLargeOnesDoNot) {
  const OwnedAttention small = MakeAttention(MakeSpec(1, 1, 1, 16, 16, 64, 64), 1);
  const OwnedAttention large = MakeAttention(MakeSpec(1, 8, 8, 512, 512, 64, 64), 1);
  const Attention* batch[] = {&small.attention, &large.attention};
  EXPECT_TRUE(CpuFlashRunsInline({batch, 1}));
  EXPECT_FALSE(CpuFlashRunsInline({batch + 1, 1}));
  EXPECT_FALSE(CpuFlashRunsInline(batch));
}

}  // namespace
}  // namespace attend::test
