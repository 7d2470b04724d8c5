// SPDX-License-Identifier: Apache-2.0
//
// How a decoding launch cuts keys into splits and splits into shares: arithmetic without a GPU.

#include "kernels/cuda/decode/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/cuda/decode/decode.h"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

TEST(DecodePlan, SplitsAreWholeTilesAndBounded) {
  std::mt19937_64 random(FreshSeed());
  for (int n = 0; n < 20000; ++n) {
    const int64_t most = int64_t{1} << (random() % 31);
    const int64_t len = std::min<int64_t>(1 + static_cast<int64_t>(random()) % most, kLengthMax);
    if (len <= 0) continue;
    const int64_t rows = 1 + static_cast<int64_t>(random() % 128);
    const int64_t keys = cuda::SplitKeys(len, rows);
    EXPECT_EQ(keys % cuda::kCostKeys, 0);
    const int64_t splits = cuda::CeilDivide(len, keys);
    EXPECT_LE(splits, cuda::kSplitsMax) << len;
    for (const int64_t longer : {len, len + 1, 2 * len, 3 * len}) {
      EXPECT_LE(splits, cuda::SplitsAtMost(longer, rows)) << len << " of " << longer;
      EXPECT_LE(splits, cuda::SplitsAtMost(longer, 1)) << "packed: as if it had one row";
    }
  }
}

// Bits depend on these lengths.
TEST(DecodePlan, SplitLengthsMatchTheTable) {
  struct Line {
    int64_t rows_from, rows_to;
    std::vector<int64_t> keys;
  };
  const std::vector<int64_t> lengths = {1, 2048, 2049, 8192, 8193, 16384, 16385, 1 << 19, 1 << 20};
  for (const Line& line : {Line{1, 16, {128, 128, 512, 512, 2048, 2048, 2048, 2048, 4096}},
                           Line{17, 32, {256, 256, 1024, 1024, 2048, 2048, 2048, 2048, 4096}},
                           Line{33, 128, {256, 256, 1024, 1024, 2048, 2048, 4096, 4096, 4096}}}) {
    for (int64_t rows = line.rows_from; rows <= line.rows_to; ++rows) {
      for (size_t n = 0; n < lengths.size(); ++n) {
        EXPECT_EQ(cuda::SplitKeys(lengths[n], rows), line.keys[n]) << lengths[n] << " " << rows;
      }
    }
  }
}

// The begin of a window changes which splits exist, not where they begin.
TEST(DecodePlan, OnlySplitsThatSomeRowSeesExist) {
  ProblemSpec spec = MakeSpec(1, 8, 1, 1, 5000, 64, 64, DType::kFloat16);
  spec.problem.mask = {Alignment::kBottomRight, 700, 0};
  Attention a;
  a.problem = spec.problem;
  const cuda::SequencePlan plan = cuda::PlanSequence(a, 0, 16);
  EXPECT_EQ(plan.key_begin, 4299);
  EXPECT_EQ(plan.key_end, 5000);
  EXPECT_EQ(plan.split_shift, 9);
  EXPECT_EQ(plan.first_split, 8);
  EXPECT_EQ(plan.splits, 2);
  a.problem.mask.left = -1;
  EXPECT_EQ(cuda::PlanSequence(a, 0, 16).splits, 10);
  EXPECT_EQ(cuda::PlanSequence(a, 0, 16).split_shift, plan.split_shift);
  a.problem.len_k = 0;
  EXPECT_EQ(cuda::PlanSequence(a, 0, 16).splits, 1) << "somebody writes the empty rows";
}

// Segments can store all strides that Hopper's kernels support; larger ones would read elsewhere.
TEST(DecodePlan, StridesThatASegmentCannotStoreAreRefused) {
  ProblemSpec spec = MakeSpec(1, 8, 1, 1, 5000, 64, 64, DType::kFloat16);
  Attention a;
  a.problem = spec.problem;
  a.q = {nullptr, 512, 64, 64};
  for (const bool paged : {false, true}) {
    a.problem.page_rows = paged ? 16 : 0;
    for (const int64_t stride : {int64_t{64}, (int64_t{1} << 35) - 8, int64_t{1} << 35}) {
      const bool fits = stride < int64_t{1} << 35;
      for (ConstTensorView* view : {&a.k, &a.v}) {
        a.k = a.v = {nullptr, 1 << 20, 64, 64};
        (paged ? view->stride_b : view->stride_l) = stride;
        EXPECT_EQ(cuda::WhyNotTma(a).empty(), fits) << stride;
        if (!fits) continue;
        cuda::Segment segment;
        cuda::DescribeSequence(a, cuda::PlanSequence(a, 0, 16), segment);
        const cuda::KeySource& source = view == &a.k ? segment.k : segment.v;
        EXPECT_EQ(int64_t{paged ? source.page_stride : source.stride} * 8, stride);
      }
    }
  }
}

// Each packed row is in one chunk, and what it sees among the chunk's keys, which are within the
// sequence's splits. A chunk's own last row bounds its keys. Neither the batch nor the number of
// heads nor pages change how a sequence is cut.
TEST(DecodePlan, ChunksCoverAllRowsAndTheirKeys) {
  std::mt19937_64 random(FreshSeed());
  for (int n = 0; n < 300; ++n) {
    const int64_t group = 1 + static_cast<int64_t>(random() % 9);
    const int64_t len_q = 1 + static_cast<int64_t>(random() % (random() % 2 == 0 ? 40 : 512));
    const int64_t len_k = static_cast<int64_t>(random() % (1 << (random() % 17)));
    Attention a;
    a.problem = MakeSpec(3, 2 * group, 2, len_q, len_k, 64, 64, DType::kFloat16).problem;
    if (random() % 2 == 0) a.problem.mask.right = 0;
    if (random() % 2 == 0) a.problem.mask.left = static_cast<int64_t>(random() % 3000);
    const int tile_rows = 16 << random() % 4;
    const cuda::SequencePlan plan = cuda::PlanSequence(a, 1, tile_rows);
    ASSERT_EQ(plan.row_tiles, cuda::CeilDivide(len_q * group, tile_rows));
    ASSERT_EQ(plan.units, 2 * plan.row_tiles);
    Attention other = a;
    other.problem.batch = 1;
    other.problem.heads_kv = 16;
    other.problem.heads_q = 16 * group;
    other.problem.page_rows = 16;
    const cuda::SequencePlan alone = cuda::PlanSequence(other, 0, tile_rows);
    EXPECT_EQ(alone.split_shift, plan.split_shift);
    EXPECT_EQ(alone.first_split, plan.first_split);
    EXPECT_EQ(alone.splits, plan.splits);
    const int64_t first = int64_t{plan.first_split} << plan.split_shift;
    const int64_t last = int64_t{plan.first_split + plan.splits} << plan.split_shift;
    int64_t packed = 0;
    for (int chunk = 0; chunk < plan.row_tiles; ++chunk) {
      cuda::Segment segment;
      cuda::DescribeSequence(a, plan, segment);
      cuda::SetRowsAndKeys(a.problem.mask, chunk * tile_rows, tile_rows, segment);
      ASSERT_EQ(segment.row_begin, packed);
      ASSERT_TRUE(segment.rows > 0 && segment.rows <= tile_rows);
      if (segment.key_begin < segment.key_end) {
        ASSERT_TRUE(first <= segment.key_begin && segment.key_end <= last);
      }
      int64_t end = 0;
      for (; packed < segment.row_begin + segment.rows; ++packed) {
        const KeyRange seen = VisibleKeys(a.problem.mask, plan.sequence, packed / group);
        if (seen.begin >= seen.end) continue;
        end = seen.end;
        ASSERT_TRUE(segment.key_begin <= seen.begin && seen.end <= segment.key_end);
        ASSERT_TRUE(seen.begin <= segment.full_begin && segment.full_end <= seen.end);
      }
      if (a.problem.mask.right == 0 && end > 0) {
        EXPECT_EQ(segment.key_end, end);
      }
    }
    EXPECT_EQ(packed, len_q * group);
  }
}

// Every split is in one share, and shares differ by at most one split. No two runs of splits that
// continue in another share begin in the same one, as each share has one counter.
TEST(DecodePlan, SharesCoverAllSplits) {
  std::mt19937_64 random(FreshSeed());
  for (int n = 0; n < 300; ++n) {
    std::vector<cuda::SequencePlan> plans;
    int64_t total = 0, dearest = 0;
    for (size_t i = 0; i < 1 + random() % 40; ++i) {
      Attention a;
      a.problem = MakeSpec(1, 8, 1 + random() % 8, 1, 1 + random() % (1 << (random() % 18)), 64, 64,
                           DType::kFloat16)
                      .problem;
      a.problem.heads_q = a.problem.heads_kv << random() % 8;
      plans.push_back(cuda::PlanSequence(a, 0, 8 << random() % 5));
      total += plans.back().cost();
      dearest = std::max<int64_t>(dearest, plans.back().split_cost);
    }
    const auto blocks = static_cast<int>(1 + random() % cuda::kBlocksMax);
    const bool alike = random() % 2 == 0;
    if (alike) {
      plans.resize(1 + random() % 9, plans.front());
      std::fill(plans.begin(), plans.end(), plans.front());
      total = static_cast<int64_t>(plans.size()) * plans.front().cost();
      dearest = plans.front().split_cost;
    }
    const cuda::Shares shares = alike ? cuda::AlignShares(total, plans.front().unit_cost(), blocks)
                                      : cuda::CutShares(total, blocks);
    std::vector<int64_t> costs(shares.blocks, 0);
    std::set<int> groups, units;  // shares in which a run begins that continues
    int64_t position = 0;
    for (const cuda::SequencePlan& plan : plans) {
      for (int unit = 0; unit < plan.units; ++unit) {
        const auto of = [&](int split) {
          return shares.Of(position + int64_t{split} * plan.split_cost);
        };
        for (int split = 0; split < plan.splits; ++split) {
          const int64_t at = position + int64_t{split} * plan.split_cost;
          const int share = of(split);
          ASSERT_GE(at, shares.Begin(share));
          ASSERT_LT(at, shares.End(share));
          ASSERT_LT(share, shares.blocks);
          costs[share] += plan.split_cost;
        }
        for (int group = 0; group < cuda::GroupCount(plan.splits); ++group) {
          const int first = group * cuda::kFanIn;
          const int last = first + cuda::GroupSize(plan.splits, group) - 1;
          const bool goes_on = of(first) != of(last);
          EXPECT_TRUE(!goes_on || groups.insert(of(first)).second);
        }
        EXPECT_TRUE(of(0) == of(plan.splits - 1) || units.insert(of(0)).second);
        position += plan.unit_cost();
      }
    }
    EXPECT_EQ(position, total);
    for (const int64_t cost : costs) EXPECT_LE(cost, shares.each + dearest);
  }
}

// Where it costs little, the chunks of one KV head are cut at the same splits.
TEST(DecodePlan, SharesOfChunksBeginTogether) {
  const auto shares = [](int64_t batch, int64_t rows, int64_t keys) {
    Attention a;
    a.problem = MakeSpec(batch, 64, 8, rows, keys, 128, 128, DType::kBFloat16).problem;
    const cuda::SequencePlan plan = cuda::PlanSequence(a, 0, 128);
    const int64_t total = batch * plan.cost();
    const cuda::Shares plain = cuda::CutShares(total, 132);
    const cuda::Shares aligned = cuda::AlignShares(total, plan.unit_cost(), 132);
    EXPECT_GE(aligned.each, plain.each);
    EXPECT_LE(aligned.each, plain.each + plain.each / 16);
    return std::pair(aligned.each, plan.unit_cost());
  };
  for (const int64_t rows : {24, 32, 64}) {
    const auto [each, unit] = shares(1, rows, 131072);
    EXPECT_EQ(unit % each, 0) << rows << " rows: several shares of a chunk";
  }
  for (const int64_t rows : {24, 32, 64, 128}) {
    const auto [each, unit] = shares(8, rows, 32768);
    EXPECT_EQ(each % unit, 0) << rows << " rows: several chunks in a share";
  }
  EXPECT_EQ(shares(8, 48, 32768).first,
            cuda::CeilDivide(8 * 8 * 3 * shares(8, 48, 32768).second, 132))
      << "192 chunks";
}

TEST(DecodePlan, DivisorsDivideExactly) {
  std::mt19937_64 random(FreshSeed());
  for (int n = 0; n < 200000; ++n) {
    const auto d = static_cast<uint32_t>(1 + (random() % 0x7fffffff >> random() % 31));
    const cuda::Divisor divisor(d);
    const auto x = static_cast<int>(random() & 0x7fffffff);
    const auto multiple = static_cast<int>(static_cast<uint32_t>(x) / d * d);
    for (const int at :
         {x, multiple, multiple - 1, multiple + static_cast<int>(d - 1), 0, 0x7fffffff}) {
      if (at < 0) continue;
      ASSERT_EQ(divisor.Of(at), static_cast<int>(static_cast<uint32_t>(at) / d))
          << at << " / " << d;
    }
  }
}

TEST(DecodePlan, WorkspaceIsBoundedForEveryBatch) {
  Problem p = MakeSpec(1, 64, 8, 1, 131072, 128, 128, DType::kBFloat16).problem;
  const Problem* one = &p;
  const Result<int64_t> alone = cuda::DecodeWorkspaceBytes({&one, 1});
  ASSERT_TRUE(alone.ok());
  EXPECT_LT(*alone, int64_t{240} << 20);
  p.batch = 4096;
  const Result<int64_t> many = cuda::DecodeWorkspaceBytes({&one, 1});
  ASSERT_TRUE(many.ok());
  EXPECT_LT(*many, *alone + (1 << 20));
  EXPECT_EQ(*cuda::DecodeWorkspaceBytes({}), cuda::kTileQueueBytes);
  p.len_q = 16;
  const Result<int64_t> chunk = cuda::DecodeWorkspaceBytes({&one, 1});
  for (const int64_t rows : {17, 512}) {
    p.len_q = rows;
    const Result<int64_t> chunks = cuda::DecodeWorkspaceBytes({&one, 1});
    ASSERT_TRUE(chunk.ok() && chunks.ok());
    EXPECT_LT(*chunks, *chunk + (1 << 20)) << "more rows are chunks of 128";
  }
  p.batch = kBatchMax;
  p.heads_q = p.heads_kv = kHeadsMax;
  p.len_q = 512;
  p.len_k = kLengthMax;
  const Result<int64_t> most = cuda::DecodeWorkspaceBytes({&one, 1});
  ASSERT_TRUE(most.ok());
  EXPECT_LT(*most, int64_t{1} << 30);
}

// Launches of different variants run one after another in the same memory.
TEST(DecodePlan, WorkspaceOfDifferentLaunchesIsTheLargest) {
  const Problem few = MakeSpec(64, 64, 8, 1, 32768, 64, 64, DType::kBFloat16).problem;
  const Problem many = MakeSpec(8, 64, 8, 16, 32768, 256, 256, DType::kBFloat16).problem;
  const Problem* const both[] = {&few, &many};
  const Result<int64_t> first = cuda::DecodeWorkspaceBytes({both, 1});
  const Result<int64_t> second = cuda::DecodeWorkspaceBytes({both + 1, 1});
  const Result<int64_t> together = cuda::DecodeWorkspaceBytes(both);
  ASSERT_TRUE(first.ok() && second.ok() && together.ok());
  EXPECT_LT(*together, std::max(*first, *second) + (1 << 20));
}

}  // namespace
}  // namespace attend::test
