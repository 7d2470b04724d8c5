// SPDX-License-Identifier: Apache-2.0
//
// How a lane cuts large attentions: arithmetic that needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract/cost.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/byte_boxes.h"
#include "kernels/cuda/lane/cut_plan.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/runtime/pinned_ranges.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using cuda::ByteBox;
using cuda::Extent;
using cuda::Extents;

std::vector<ByteBox> Boxes(int64_t run, const Extents& extents) {
  std::vector<ByteBox> boxes;
  EXPECT_TRUE(cuda::AppendBoxes(run, extents, &boxes));
  EXPECT_EQ(cuda::CountBoxes(run, extents), static_cast<int64_t>(boxes.size()));
  return boxes;
}

void ExpectBox(const ByteBox& box, int64_t offset, int64_t width, int64_t rows, int64_t pitch) {
  EXPECT_EQ(box.offset, offset);
  EXPECT_EQ(box.width, width);
  EXPECT_EQ(box.rows, rows);
  EXPECT_EQ(box.pitch, rows > 1 ? pitch : 0);
}

TEST(ByteBoxes, DenseIsOneRun) {
  const std::vector<ByteBox> boxes = Boxes(128, {Extent{100, 128}, {8, 12800}, {2, 102400}});
  ASSERT_EQ(boxes.size(), 1u);
  ExpectBox(boxes[0], 0, 2 * 102400, 1, 0);
}

TEST(ByteBoxes, HeadsOfBlhdAreRows) {  // 2 of 16 heads of 100 rows of 3 sequences
  const std::vector<ByteBox> boxes =
      Boxes(256, {Extent{100, 16 * 256}, {2, 256}, {3, 100 * 16 * 256}});
  ASSERT_EQ(boxes.size(), 1u) << "rows of all sequences are equally far apart";
  ExpectBox(boxes[0], 0, 512, 300, 16 * 256);
}

TEST(ByteBoxes, GapsEverywhereTakeTheLongestDimensionAsRows) {
  const std::vector<ByteBox> boxes = Boxes(8, {Extent{50, 10}, {3, 600}, {2, 5000}});
  ASSERT_EQ(boxes.size(), 6u);
  for (const ByteBox& box : boxes) ExpectBox(box, box.offset, 8, 50, 10);
  EXPECT_EQ(boxes.back().offset, 2 * 600 + 5000);
  EXPECT_EQ(cuda::SpannedBytes(8, {Extent{50, 10}, {3, 600}, {2, 5000}}),
            8 + 49 * 10 + 2 * 600 + 5000);
}

TEST(ByteBoxes, BroadcastAndEmptyDimensions) {
  const std::vector<ByteBox> boxes = Boxes(8, {Extent{5, 8}, {7, 0}, {1, 12345}});
  ASSERT_EQ(boxes.size(), 1u);
  ExpectBox(boxes[0], 0, 40, 1, 0);
  EXPECT_TRUE(Boxes(8, {Extent{5, 8}, {0, 40}, {2, 40}}).empty());
  EXPECT_TRUE(Boxes(0, {Extent{5, 8}, {1, 40}, {2, 40}}).empty());
}

TEST(ByteBoxes, PitchesAboveTheCopyEnginesLimitAreCopiedRowByRow) {
  const int64_t far = cuda::kPitchMax + 1;
  const std::vector<ByteBox> boxes = Boxes(8, {Extent{3, far}, {1, 0}, {1, 0}});
  ASSERT_EQ(boxes.size(), 3u);
  ExpectBox(boxes[2], 2 * far, 8, 1, 0);
}

TEST(ByteBoxes, OverlapsAreRefused) {
  std::vector<ByteBox> boxes;
  for (const Extents& extents :
       {Extents{Extent{5, 7}, {1, 0}, {1, 0}}, Extents{Extent{5, -8}, {1, 0}, {1, 0}},
        Extents{Extent{5, 8}, {2, 39}, {1, 0}}}) {
    EXPECT_FALSE(cuda::AppendBoxes(8, extents, &boxes));
    EXPECT_EQ(cuda::CountBoxes(8, extents), -1);
  }
  EXPECT_TRUE(boxes.empty());
}

// Every byte of every element once, and no other.
TEST(ByteBoxes, CoverEveryByteOfEveryElementOnce) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const auto draw = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  for (int n = 0; n < 500; ++n) {
    const int64_t run = draw(1, 9);
    Extents extents;
    int64_t stride = run + (draw(0, 1) == 0 ? 0 : draw(0, 5));
    for (Extent& extent : extents) {
      extent = {draw(1, 4), stride};
      stride = stride * extent.count + (draw(0, 1) == 0 ? 0 : draw(0, 7));
    }
    std::vector<int> wanted(static_cast<size_t>(cuda::SpannedBytes(run, extents)));
    std::vector<int> covered(wanted.size());
    const auto add = [](std::vector<int>* counts, int64_t at, int64_t bytes) {
      for (int64_t i = 0; i < bytes; ++i) ++(*counts)[static_cast<size_t>(at + i)];
    };
    for (int64_t a = 0; a < extents[0].count; ++a) {
      for (int64_t b = 0; b < extents[1].count; ++b) {
        for (int64_t c = 0; c < extents[2].count; ++c) {
          add(&wanted, a * extents[0].stride + b * extents[1].stride + c * extents[2].stride, run);
        }
      }
    }
    std::shuffle(extents.begin(), extents.end(), random);
    for (const ByteBox& box : Boxes(run, extents)) {
      for (int64_t row = 0; row < box.rows; ++row) {
        add(&covered, box.offset + row * box.pitch, box.width);
      }
    }
    ASSERT_EQ(wanted, covered) << "seed " << seed << " round " << n;
  }
}

ProblemSpec Long(int64_t batch, int64_t heads, int64_t length) {
  ProblemSpec spec = MakeSpec(batch, heads, heads, length, length, 128, 128, DType::kFloat16);
  spec.problem.return_lse = false;
  return spec;
}

// Contiguous, without memory: planning reads lengths only.
Attention Described(const ProblemSpec& spec) {
  Attention a;
  a.problem = spec.problem;
  return a;
}

std::vector<AttentionSlice> Plan(const ProblemSpec& spec,
                                 KernelId kernel = KernelId::kCudaFlashSm90) {
  return cuda::PlanParts(Described(spec), kernel, cuda::CutBounds{});
}

TEST(PlanParts, SmallOnesStayWhole) {
  EXPECT_TRUE(Plan(Long(1, 8, 128)).empty());
  EXPECT_TRUE(Plan(Long(1, 1, 1)).empty());
  EXPECT_TRUE(Plan(Long(0, 8, 128)).empty());
  EXPECT_TRUE(Plan(Long(4, 8, 256)).empty());
}

TEST(PlanParts, LongOnesAreCutByHeadsFirst) {
  const std::vector<AttentionSlice> parts = Plan(Long(1, 16, 16384));
  // A head is nearly a wave of the kernel's tiles.
  EXPECT_EQ(parts.size(), 16u);
  for (const AttentionSlice& part : parts) {
    EXPECT_EQ(part.rows_begin, 0);
    EXPECT_EQ(part.rows_end, 16384);
  }
}

TEST(PlanParts, LaunchesAreShort) {
  ProblemSpec spec = Long(4, 16, 8192);
  for (const bool causal : {false, true}) {
    spec.problem.mask.right = causal ? 0 : -1;
    for (const KernelId kernel : {KernelId::kCudaFlashSm90, KernelId::kCudaFlashSm80}) {
      const double rate = kernel == KernelId::kCudaFlashSm90 ? 650e12 : 340e12;
      for (const AttentionSlice& slice : Plan(spec, kernel)) {
        const Result<Attention> part = TakeSlice(Described(spec), slice);
        ASSERT_TRUE(part.ok());
        EXPECT_EQ(slice.rows_begin % cuda::kCutRows, 0);
        EXPECT_LE(Flops(*part) / rate, 1.2 * cuda::CutBounds{}.launch_seconds_max);
      }
    }
  }
}

// Drawing the dropout takes as long as many of the products.
TEST(PlanParts, DropoutMakesLaunchesLonger) {
  const ProblemSpec spec = Long(8, 16, 8192);
  ProblemSpec dropped = spec;
  dropped.problem.dropout = 6554;
  const double slower = Cost(Described(dropped), KernelId::kCudaFlashSm90) /
                        Cost(Described(spec), KernelId::kCudaFlashSm90);
  ASSERT_GT(slower, 1.5);
  const cuda::CutBounds bounds;
  const std::vector<AttentionSlice> parts = Plan(dropped);
  EXPECT_GT(parts.size(), Plan(spec).size());
  const auto seconds = [&](const AttentionSlice& slice) {
    return slower * Flops(TakeSlice(Described(dropped), slice).value()) / 650e12;
  };
  for (const AttentionSlice& part : parts) {
    EXPECT_LE(seconds(part), 1.2 * bounds.launch_seconds_max);
  }
  for (const AttentionSlice& slice :
       cuda::JoinParts(Described(dropped), KernelId::kCudaFlashSm90, bounds, parts)) {
    EXPECT_LE(seconds(slice), 1.001 * bounds.in_place_seconds_max);
  }
}

// Parts of less than a wave of tiles, one after another, would leave most of the device idle.
TEST(PlanParts, LaunchesOfLongTilesFillTheDevice) {
  struct Case {
    int64_t heads, length;
    KernelId kernel;
    DType dtype;
  };
  const Case cases[] = {
      {1, 131072, KernelId::kCudaFlashFp32, DType::kFloat32},
      {1, 32768, KernelId::kCudaFlashFp32, DType::kFloat32},
      {8, 16384, KernelId::kCudaFlashFp32, DType::kFloat32},
      {2, 131072, KernelId::kCudaFlashSm90, DType::kFloat16},
      {16, 32768, KernelId::kCudaFlashSm90, DType::kFloat16},
      {16, 65536, KernelId::kCudaFlashSm90, DType::kFloat16},
      {16, 131072, KernelId::kCudaFlashSm90, DType::kFloat16},
      {16, 65536, KernelId::kCudaFlashSm80, DType::kFloat16},
  };
  for (const Case& each : cases) {
    for (const bool causal : {false, true}) {
      ProblemSpec spec = Long(1, each.heads, each.length);
      spec.problem.dtype = each.dtype;
      spec.problem.mask.right = causal ? 0 : -1;
      const double tile_rows = cuda::VariantsFor(each.kernel, spec.problem).front().rows;
      double waves = 0, tiles = 0;
      const std::vector<AttentionSlice> parts = Plan(spec, each.kernel);
      ASSERT_GT(parts.size(), 1u);
      for (const AttentionSlice& part : parts) {
        const double part_tiles =
            std::ceil(static_cast<double>(part.rows_end - part.rows_begin) / tile_rows) *
            static_cast<double>(part.heads_end - part.heads_begin);
        waves += std::ceil(part_tiles / 132);
        tiles += part_tiles;
      }
      EXPECT_LE(waves, 1.35 * std::ceil(tiles / 132))
          << each.heads << " heads of " << each.length << (causal ? " causal, " : ", ")
          << parts.size() << " parts";
    }
  }
}

TEST(PlanParts, MasksThatRowsCannotBeCutUnderLeaveThemWhole) {
  ProblemSpec spec = Long(1, 2, 131072);
  spec.problem.mask = {Alignment::kBottomRight, 100000, 100000};
  EXPECT_EQ(Plan(spec).size(), 2u);
}

// Items in place are cut into few parts, none of them long, with the same bits.
TEST(JoinParts, LongItemsBecomeFewPartsOfTheSameVariants) {
  const auto names = [](const Problem& p) {
    std::string all;
    for (const auto& variant : cuda::VariantsFor(KernelId::kCudaFlashSm90, p)) {
      all += std::string(variant.name) + " ";
    }
    return all;
  };
  const cuda::CutBounds bounds;
  for (const auto& [batch, heads, length, dim] :
       std::vector<std::array<int64_t, 4>>{{1, 16, 8192, 128},
                                           {1, 16, 16384, 128},
                                           {4, 16, 2048, 64},
                                           {1, 16, 8192, 64},
                                           {1, 2, 32768, 128},
                                           {32, 8, 1024, 96}}) {
    for (const bool causal : {false, true}) {
      ProblemSpec spec = Long(batch, heads, length);
      spec.problem.dim = spec.problem.dim_v = dim;
      spec.problem.mask.right = causal ? 0 : -1;
      const Attention whole = Described(spec);
      const std::vector<AttentionSlice> parts = Plan(spec);
      ASSERT_FALSE(parts.empty());
      const std::vector<AttentionSlice> joined =
          cuda::JoinParts(whole, KernelId::kCudaFlashSm90, bounds, parts);
      EXPECT_LE(joined.size(), parts.size());
      // Each consists of some parts that follow each other.
      size_t next = 0;
      for (const AttentionSlice& slice : joined) {
        const Result<Attention> large = TakeSlice(whole, slice);
        ASSERT_TRUE(large.ok());
        const size_t first = next;
        double flops = 0;
        while (next < parts.size() && flops < 0.999 * Flops(*large)) {
          const Result<Attention> part = TakeSlice(whole, parts[next++]);
          ASSERT_TRUE(part.ok());
          EXPECT_EQ(names(part->problem), names(large->problem));
          flops += Flops(*part);
        }
        EXPECT_NEAR(flops, Flops(*large), 1e-9 * flops);
        EXPECT_EQ(slice.batch_begin, parts[first].batch_begin);
        EXPECT_EQ(slice.heads_begin, parts[first].heads_begin);
        EXPECT_EQ(slice.rows_begin, parts[first].rows_begin);
        EXPECT_EQ(slice.rows_end, parts[next - 1].rows_end);
        EXPECT_EQ(slice.heads_end, parts[next - 1].heads_end);
        EXPECT_EQ(slice.batch_end, parts[next - 1].batch_end);
        if (next - first > 1) {
          EXPECT_LE(Flops(*large) / 650e12, bounds.in_place_seconds_max);
        }
        if (causal) {
          EXPECT_EQ(slice.rows_end - slice.rows_begin,
                    parts[first].rows_end - parts[first].rows_begin);
        }
      }
      EXPECT_EQ(next, parts.size());
    }
  }
  const ProblemSpec spec = Long(1, 16, 8192);
  EXPECT_EQ(cuda::JoinParts(Described(spec), KernelId::kCudaFlashSm90, bounds, Plan(spec)).size(),
            1u)
      << "0.85 ms";
  const cuda::CutBounds many = {.parts_min = 5};
  EXPECT_EQ(cuda::JoinParts(Described(spec), KernelId::kCudaFlashSm90, many, Plan(spec)).size(),
            5u);
}

// The GPU runs dry behind a short last launch.
TEST(JoinParts, LaunchesAreEvenlyLong) {
  const cuda::CutBounds bounds;
  for (const int64_t heads : {8, 12, 16, 24, 32}) {
    const ProblemSpec spec = Long(1, heads, 8192);
    const Attention whole = Described(spec);
    double shortest = Flops(whole), longest = 0;
    std::vector<int> covered(static_cast<size_t>(heads));
    for (const AttentionSlice& slice :
         cuda::JoinParts(whole, KernelId::kCudaFlashSm90, bounds, Plan(spec))) {
      const Result<Attention> part = TakeSlice(whole, slice);
      ASSERT_TRUE(part.ok());
      shortest = std::min(shortest, Flops(*part));
      longest = std::max(longest, Flops(*part));
      EXPECT_LE(Flops(*part) / 650e12, bounds.in_place_seconds_max);
      EXPECT_EQ(slice.batch_end - slice.batch_begin, 1);
      EXPECT_EQ(slice.rows_end - slice.rows_begin, 8192);
      for (int64_t h = slice.heads_begin; h < slice.heads_end; ++h) ++covered[h];
    }
    EXPECT_LE(longest, 1.5 * shortest) << heads << " heads";
    EXPECT_EQ(covered, std::vector<int>(static_cast<size_t>(heads), 1)) << heads << " heads";
  }
}

TEST(LayOut, PartsNeedTheLargestPartsWorkspace) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 4, 4, 64, 64, 8, 8), FreshSeed());
  Selection selection;
  selection.kernel = KernelId::kCudaNaive;
  const WorkItem item = owned.Item(selection);
  const cuda::BatchCuts cuts = {{{0, 1, 0, 1, 0, 64}, {0, 1, 1, 4, 0, 64}}};
  const Result<cuda::BatchLayout> whole = cuda::LayOut({&item, 1}, INT64_MAX);
  const Result<cuda::BatchLayout> cut = cuda::LayOut({&item, 1}, INT64_MAX, cuts);
  ASSERT_TRUE(whole.ok() && cut.ok());
  EXPECT_EQ(whole->workspace_bytes - cut->workspace_bytes, 64 * 64 * 4) << "scores of a head";
}

TEST(PinnedRanges, ContainOnlyBytesOfOneRange) {
  cuda::PinnedRanges ranges;
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  ranges.Add(at(0x1000), 0x100);
  ranges.Add(at(0x1100), 0x100);
  EXPECT_TRUE(ranges.Contain(at(0x1000), 0x100));
  EXPECT_TRUE(ranges.Contain(at(0x10ff), 1));
  EXPECT_TRUE(ranges.Contain(at(0x1150), 0xb0));
  EXPECT_FALSE(ranges.Contain(at(0x10ff), 2)) << "two ranges are not one";
  EXPECT_FALSE(ranges.Contain(at(0xfff), 2));
  EXPECT_FALSE(ranges.Contain(at(0x1200), 1));
  ranges.Remove(at(0x1000));
  EXPECT_FALSE(ranges.Contain(at(0x1000), 1));
  EXPECT_TRUE(ranges.Contain(at(0x1100), 0x100));
}

}  // namespace
}  // namespace attend::test
