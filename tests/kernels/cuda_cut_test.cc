// SPDX-License-Identifier: Apache-2.0
//
// How a lane cuts large attentions and which bytes it moves for each part: arithmetic that needs no
// GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_reference.h"
#include "kernels/cuda/batch_layout.h"
#include "kernels/cuda/byte_boxes.h"
#include "kernels/cuda/cut_plan.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/part_copies.h"
#include "kernels/cuda/pinned_ranges.h"
#include "tests/kernels/problems.h"

namespace attend::test {
namespace {

using cuda::BoxCopy;
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

TEST(ByteBoxes, PitchesThatNoEngineTakesAreRepeated) {
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
TEST(ByteBoxes, CoverWhatTheyShould) {
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
  // Three heads are nearly two waves of the kernel's tiles; two heads would be two waves too.
  EXPECT_EQ(parts.size(), 6u);
  for (const AttentionSlice& part : parts) {
    EXPECT_EQ(part.rows_begin, 0);
    EXPECT_EQ(part.rows_end, 16384);
  }
}

TEST(PlanParts, NoLaunchIsLong) {
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

// What a lane does with its parts, on the host: only what the copies bring is there, all else is
// NaN; the answer must be the whole's, bit for bit, and nothing else may be written.
void ExpectPartsAreTheWhole(const ProblemSpec& spec, int parts, uint64_t seed, int* cut) {
  OwnedAttention owned = MakeAttention(spec, seed);
  CpuReference(owned.attention);
  const std::vector<std::byte> whole = owned.OutputBytes();
  owned.ResetOutput();
  const std::vector<AttentionSlice> slices =
      cuda::PlanParts(owned.attention, KernelId::kCudaFlashFp32, {.parts_min = parts});
  const WorkItem item = owned.Item(Selection{});
  if (slices.empty()) return;
  ASSERT_TRUE(cuda::CanMoveInParts(item)) << Describe(spec);
  ++*cut;
  const Block input = MakeBlock(owned.input.bytes), output = MakeBlock(owned.output.bytes);
  std::memset(input.get(), 0xff, static_cast<size_t>(owned.input.bytes));
  std::memset(output.get(), 0xff, static_cast<size_t>(owned.output.bytes));
  const Result<Attention> device = cuda::Rebase(
      item, {{reinterpret_cast<char*>(input.get())}, {reinterpret_cast<char*>(output.get())}});
  ASSERT_TRUE(device.ok()) << device.status().ToString();
  const cuda::TwoViews views = {owned.attention, *device};
  cuda::PartCopies copies(views);
  int64_t bytes_in = 0;
  const auto copy = [](const std::vector<BoxCopy>& boxes) {
    int64_t bytes = 0;
    for (const BoxCopy& box : boxes) {
      bytes += box.width * box.rows;
      for (int64_t row = 0; row < box.rows; ++row) {
        std::memcpy(box.to + row * box.pitch, box.from + row * box.pitch,
                    static_cast<size_t>(box.width));
      }
    }
    return bytes;
  };
  bytes_in += copy(copies.Arrays());
  for (const AttentionSlice& slice : slices) {
    const Result<cuda::TwoViews> part = cuda::TakeSlice(views, slice);
    ASSERT_TRUE(part.ok()) << part.status().ToString();
    bytes_in += copy(copies.In(*part));
    CpuReference(part->device);
    copy(cuda::PartCopies::Out(*part));
  }
  EXPECT_LE(bytes_in, owned.input.bytes) << "copied twice: " << Describe(spec);
  EXPECT_TRUE(owned.GuardsIntact()) << Describe(spec);
  EXPECT_EQ(whole, owned.OutputBytes()) << Describe(spec) << " in " << parts << " seed " << seed;
}

TEST(PartCopies, BringWhatEachPartNeedsAndNoMore) {
  const uint64_t seed = FreshSeed();
  int cut = 0;
  const int count = std::max(50, static_cast<int>(800 * TestScale()));
  for (int n = 0; n < count && !testing::Test::HasFailure(); ++n) {
    const uint64_t each = seed + static_cast<uint64_t>(n);
    ExpectPartsAreTheWhole(RandomSpec(each, 1e5), 2 + n % 6, each, &cut);
  }
  EXPECT_GT(cut, count / 10);  // many have one sequence and one KV head
}

TEST(PartCopies, RowsBringTheirKeysOnce) {
  const uint64_t seed = FreshSeed();
  int cut = 0;
  for (const auto layout : {Layout::kBHLD, Layout::kBLHD, Layout::kStrided}) {
    for (const int64_t right : {int64_t{-1}, int64_t{0}}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 2000, right == 0 ? 2100 : 40, 3, 4);
      spec.layout = layout;
      spec.problem.mask.right = right;
      spec.problem.mask.left = right == 0 ? 30 : -1;
      spec.problem.has_bias = true;
      spec.bias_per_query = right == 0;
      spec.problem.has_sinks = true;
      ExpectPartsAreTheWhole(spec, 3, seed, &cut);
    }
  }
  EXPECT_EQ(cut, 6);
}

// Where one tensor is seen as two: what came for Q is not taken for K.
TEST(PartCopies, TensorsMayShareMemory) {
  ProblemSpec spec = MakeSpec(2, 4, 4, 9, 9, 8, 8);
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  owned.attention.k = owned.attention.q;
  const WorkItem item = owned.Item(Selection{});
  ASSERT_TRUE(cuda::CanMoveInParts(item));
  cuda::PartCopies copies({owned.attention, owned.attention});
  const Result<cuda::TwoViews> part =
      cuda::TakeSlice({owned.attention, owned.attention}, {0, 1, 1, 2, 0, 9});
  ASSERT_TRUE(part.ok());
  EXPECT_EQ(copies.In(*part).size(), 3u);
}

TEST(CanMoveInParts, RefusesWhatLiesOutsideOrOverlaps) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 30, 40, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  EXPECT_TRUE(cuda::CanMoveInParts(item));
  item.inputs = {{owned.input.data, owned.input.bytes / 2}};
  EXPECT_FALSE(cuda::CanMoveInParts(item));
  item = owned.Item(Selection{});
  item.attention.o.stride_h = 0;
  EXPECT_FALSE(cuda::CanMoveInParts(item));
  item = owned.Item(Selection{});
  item.attention.q.stride_l -= 1;
  EXPECT_FALSE(cuda::CanMoveInParts(item));

  ProblemSpec packed = MakeSpec(2, 1, 1, 1, 1, 8, 8);
  packed.problem.packed = true;
  packed.q_lengths = packed.kv_lengths = {3, 4};
  owned = MakeAttention(packed, FreshSeed());
  EXPECT_TRUE(cuda::CanMoveInParts(owned.Item(Selection{})));
  const_cast<int64_t*>(owned.attention.q_offsets)[1] = 9;
  EXPECT_FALSE(cuda::CanMoveInParts(owned.Item(Selection{})));
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

TEST(PinnedRanges, KnowWhatLiesInOne) {
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
