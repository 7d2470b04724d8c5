// SPDX-License-Identifier: Apache-2.0
//
// Plans and parts against the whole: bit for bit, each in its own bytes, and of about equal cost.

#include "server/split/split_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>

#include "kernels/reference/cpu_reference.h"
#include "server/split/split_parts.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/split_specs.h"

namespace attend {
namespace {

using test::MakeAttention;
using test::MakeSpec;
using test::OwnedAttention;
using test::ProblemSpec;

constexpr int64_t kPoolBytes = int64_t{1} << 20;

// The whole by its parts, over what `owned` holds.
Status ComputeByParts(const OwnedAttention& owned, const std::vector<QuerySlice>& slices) {
  test::FakeBackend device;
  const std::unique_ptr<HostPool> pool = *HostPool::Make(device.host_allocator(), kPoolBytes, {1});
  const auto parts = test::ComputeParts(owned, slices, *pool);
  if (!parts.ok()) return parts.status();
  for (size_t n = 0; n < slices.size(); ++n) GatherLse(*(*parts)[n], slices[n], owned.attention);
  return Status();
}

double LargestShare(const Attention& whole, const std::vector<QuerySlice>& slices) {
  std::map<int, double> shards;
  for (const QuerySlice& slice : slices) {
    const Result<Attention> part = TakeQuerySlice(whole, slice);
    shards[slice.shard] += Flops(*part);
  }
  double largest = 0;
  for (const auto& [shard, flops] : shards) largest = std::max(largest, flops);
  return largest / Flops(whole);
}

TEST(SplitPlan, PartsAreTheWholeBitForBit) {
  const uint64_t seed = test::FreshSeed();
  int planned = 0, rows_cut = 0, heads_cut = 0, packed_cut = 0;
  const int count = std::max(100, static_cast<int>(3000 * test::TestScale()));
  for (int n = 0; n < count; ++n) {
    std::mt19937_64 random(seed + static_cast<uint64_t>(n));
    ProblemSpec spec = test::SplittableSpec(random(), 5e4);
    OwnedAttention owned = MakeAttention(spec, random());
    const int shards = 2 + static_cast<int>(random() % 5);
    const int64_t multiple = 1 + static_cast<int64_t>(random() % 8);
    const std::vector<QuerySlice> slices = PlanSplit(owned.attention, shards, multiple);
    if (slices.empty()) continue;
    const std::string what = Describe(spec) + " seed " + std::to_string(seed + n);
    const Problem& p = owned.attention.problem;
    ++planned;
    packed_cut += p.packed;
    EXPECT_GT(slices.back().shard, 0) << what;
    EXPECT_LT(slices.back().shard, shards) << what;
    EXPECT_LE(LargestShare(owned.attention, slices), 0.75 + 1e-9) << what;
    for (const QuerySlice& slice : slices) {
      EXPECT_EQ(slice.rows_begin % multiple, 0) << what;
      rows_cut += slice.rows_begin > 0;
      heads_cut += slice.heads_begin > 0;
    }
    CpuReference(owned.attention);
    const std::vector<std::byte> expected = owned.OutputBytes();
    owned.ResetOutput();
    const Status status = ComputeByParts(owned, slices);
    ASSERT_TRUE(status.ok()) << status.ToString() << " " << what;
    ASSERT_TRUE(owned.GuardsIntact()) << what;
    ASSERT_EQ(expected, owned.OutputBytes()) << what;
    EXPECT_EQ(slices, PlanSplit(owned.attention, shards, multiple)) << what;
  }
  // A share of the problems, as sanitizers run, need not meet every case.
  if (test::TestScale() < 1) return;
  EXPECT_GT(planned, count / 5);
  for (const int each : {rows_cut, heads_cut, packed_cut}) EXPECT_GT(each, 20);
}

// Everything about where a plan cuts, of problems whose values nobody reads.
class Planned {
 public:
  Planned(const ProblemSpec& spec, int shards)
      : owned_(MakeAttention(spec, 1)), pieces_(PlanSplit(owned_.attention, shards)) {}

  const std::vector<QuerySlice>& slices() const { return pieces_; }
  int shards() const { return pieces_.empty() ? 1 : pieces_.back().shard + 1; }
  double largest() const { return LargestShare(owned_.attention, pieces_); }

 private:
  OwnedAttention owned_;
  std::vector<QuerySlice> pieces_;
};

TEST(SplitPlan, SequencesFirst) {
  const Planned plan(MakeSpec(8, 4, 2, 64, 64, 8, 8), 4);
  const std::vector<QuerySlice> expected = {{0, 0, 2, 0, 4, 0, 64},
                                            {1, 2, 4, 0, 4, 0, 64},
                                            {2, 4, 6, 0, 4, 0, 64},
                                            {3, 6, 8, 0, 4, 0, 64}};
  EXPECT_EQ(plan.slices(), expected);
}

TEST(SplitPlan, ThenKvHeadsThenQueryHeads) {
  const std::vector<QuerySlice> by_kv = {{0, 0, 1, 0, 8, 0, 64}, {1, 0, 1, 8, 16, 0, 64}};
  EXPECT_EQ(Planned(MakeSpec(1, 16, 4, 64, 64, 8, 8), 2).slices(), by_kv);
  EXPECT_EQ(Planned(MakeSpec(1, 16, 1, 64, 64, 8, 8), 2).slices(), by_kv) << "of one KV head";
  // Two KV heads over three devices: a group is cut rather than a device left with two thirds.
  const Planned three(MakeSpec(1, 12, 2, 64, 64, 8, 8), 3);
  EXPECT_EQ(three.shards(), 3);
  EXPECT_DOUBLE_EQ(three.largest(), 1.0 / 3);
  // Three sequences over two.
  const Planned two(MakeSpec(3, 4, 2, 64, 64, 8, 8), 2);
  const std::vector<QuerySlice> expected = {{0, 0, 1, 0, 4, 0, 64},
                                            {0, 1, 2, 0, 2, 0, 64},
                                            {1, 1, 2, 2, 4, 0, 64},
                                            {1, 2, 3, 0, 4, 0, 64}};
  EXPECT_EQ(two.slices(), expected);
}

TEST(SplitPlan, RowsWhenHeadsDoNotSuffice) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 4096, 4096, 1, 1);
  const Planned full(spec, 4);
  EXPECT_EQ(full.slices().size(), 4u);
  EXPECT_DOUBLE_EQ(full.largest(), 0.25);
  // Under a causal mask the last rows cost most: unequal ranges, as equal as 512 rows allow.
  spec.problem.mask.right = 0;
  const Planned causal(spec, 4);
  ASSERT_EQ(causal.slices().size(), 4u);
  EXPECT_LT(causal.largest(), 0.25 + 0.13) << "half of 512 of 4096 rows at either end";
  EXPECT_GT(causal.slices()[0].rows_end, 1024);
  for (const QuerySlice& slice : causal.slices())
    EXPECT_EQ(slice.rows_begin % thresholds::kSplitRows, 0);
  // Three heads over two devices: the middle one is cut.
  spec.problem.mask.right = -1;
  spec.problem.heads_q = spec.problem.heads_kv = 3;
  EXPECT_DOUBLE_EQ(Planned(spec, 2).largest(), 0.5);
}

TEST(SplitPlan, InBlhdRowsOfAllHeads) {
  ProblemSpec spec = MakeSpec(1, 6, 2, 2048, 300, 1, 1);
  spec.layout = test::Layout::kBLHD;
  const std::vector<QuerySlice> expected = {{0, 0, 1, 0, 6, 0, 1024}, {1, 0, 1, 0, 6, 1024, 2048}};
  EXPECT_EQ(Planned(spec, 2).slices(), expected);
  spec.problem.mask = {Alignment::kBottomRight, 5, 5};  // rows cannot be cut
  EXPECT_TRUE(Planned(spec, 2).slices().empty());
  spec.problem.batch = 2;
  EXPECT_EQ(Planned(spec, 2).shards(), 2);
  EXPECT_EQ(Planned(spec, 4).shards(), 2) << "there are no more sequences";
}

TEST(SplitPlan, LengthsAreWhatCosts) {
  ProblemSpec spec = MakeSpec(4, 1, 1, 64, 64, 8, 8);
  spec.q_lengths = {64, 64, 64, 64};
  spec.kv_lengths = {60, 20, 20, 20};
  const Planned plan(spec, 2);
  ASSERT_EQ(plan.slices().size(), 2u);
  EXPECT_EQ(plan.slices()[0].batch_end, 1);
  spec.kv_lengths = {0, 0, 30, 30};
  EXPECT_EQ(Planned(spec, 2).slices()[0].batch_end, 3) << "empty sequences cost nothing";
  spec.kv_lengths = {0, 0, 64, 0};
  EXPECT_TRUE(Planned(spec, 4).slices().empty()) << "all of the cost is in one head";
}

TEST(SplitPlan, WhatCannotBeSplitIsNot) {
  EXPECT_TRUE(Planned(MakeSpec(1, 1, 1, 500, 500, 4, 4), 4).slices().empty()) << "one tile";
  EXPECT_TRUE(Planned(MakeSpec(4, 4, 4, 64, 64, 4, 4), 1).slices().empty()) << "one device";
  EXPECT_TRUE(Planned(MakeSpec(0, 4, 4, 64, 64, 4, 4), 2).slices().empty());
  EXPECT_TRUE(Planned(MakeSpec(4, 4, 4, 64, 0, 4, 4), 2).slices().empty());
  ProblemSpec gaps = MakeSpec(4, 4, 4, 64, 64, 4, 4);
  gaps.layout = test::Layout::kStrided;
  EXPECT_TRUE(Planned(gaps, 2).slices().empty()) << "O is not one run of memory";
}

TEST(SplitParts, WithoutMemoryForTheirBlocksThereAreNone) {
  ProblemSpec spec = MakeSpec(1, 6, 2, 2048, 30, 1, 1);
  spec.layout = test::Layout::kBLHD;
  const OwnedAttention owned = MakeAttention(spec, test::FreshSeed());
  test::FakeBackend device;
  const std::unique_ptr<HostPool> pool = *HostPool::Make(device.host_allocator(), 4096, {1});
  Request whole;
  whole.attention = owned.attention;
  const auto parts = MakeParts(whole, PlanSplit(owned.attention, 2), *pool);
  ASSERT_FALSE(parts.ok());
  EXPECT_EQ(parts.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(pool->used_bytes(), 0);
}

}  // namespace
}  // namespace attend
