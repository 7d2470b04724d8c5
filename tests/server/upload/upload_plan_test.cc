// SPDX-License-Identifier: Apache-2.0
//
// How uploads are divided: always the device's own parts, in runs of memory, and never too small.

#include "server/upload/upload_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "server/request/tensor_extents.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

using Slices = std::vector<AttentionSlice>;

// Every KV head of every sequence, its rows in so many parts.
Slices PartsOf(const Problem& p, int64_t rows_parts) {
  Slices parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t r = 0; r < rows_parts; ++r) {
        parts.push_back(
            {b, b + 1, h, h + 1, p.len_q * r / rows_parts, p.len_q * (r + 1) / rows_parts});
      }
    }
  }
  return parts;
}

bool Same(const AttentionSlice& a, const AttentionSlice& b) {
  return a.batch_begin == b.batch_begin && a.batch_end == b.batch_end &&
         a.heads_begin == b.heads_begin && a.heads_end == b.heads_end &&
         a.rows_begin == b.rows_begin && a.rows_end == b.rows_end;
}

// That the groups' parts, counted from the whole again, are exactly `parts`, in order.
void ExpectParts(const std::vector<UploadGroup>& groups, const Slices& parts) {
  size_t n = 0;
  for (const UploadGroup& group : groups) {
    for (AttentionSlice part : group.parts) {
      part.batch_begin += group.slice.batch_begin;
      part.batch_end += group.slice.batch_begin;
      part.heads_begin += group.slice.heads_begin;
      part.heads_end += group.slice.heads_begin;
      ASSERT_LT(n, parts.size());
      EXPECT_TRUE(Same(part, parts[n])) << n;
      ++n;
    }
  }
  EXPECT_EQ(n, parts.size());
}

// 64 * 16 floats a head: 4 KiB each of Q, K, V and O.
test::OwnedAttention Dense(int64_t batch, int64_t heads_q, int64_t heads_kv,
                           test::Layout layout = test::Layout::kBHLD) {
  test::ProblemSpec spec = test::MakeSpec(batch, heads_q, heads_kv, 64, 64, 16, 16);
  spec.layout = layout;
  return test::MakeAttention(spec, 1);
}

TEST(UploadPlan, RowsOfAHeadStayTogether) {
  const test::OwnedAttention whole = Dense(2, 6, 3);
  const Slices parts = PartsOf(whole.attention.problem, 4);
  const auto groups = PlanUpload(whole.attention, parts, 1);
  ASSERT_EQ(groups.size(), 6u);
  for (const UploadGroup& group : groups) {
    EXPECT_EQ(group.parts.size(), 4u);
    EXPECT_EQ(group.slice.rows_end - group.slice.rows_begin, 64);
  }
  ExpectParts(groups, parts);
}

// Each with two query heads: 6 * 4 KiB.
TEST(UploadPlan, NeighboursAreJoinedUntilTheyAreLargeEnough) {
  const test::OwnedAttention whole = Dense(1, 14, 7);
  const Slices parts = PartsOf(whole.attention.problem, 1);
  const auto groups = PlanUpload(whole.attention, parts, 50'000);
  ASSERT_EQ(groups.size(), 3u) << "three heads, three heads, and the last one";
  EXPECT_EQ(groups[0].slice.heads_end, 3);
  EXPECT_EQ(groups[1].slice.heads_begin, 3);
  EXPECT_EQ(groups[1].slice.heads_end, 6);
  EXPECT_EQ(groups[2].slice.heads_end, 7);
  ExpectParts(groups, parts);
  EXPECT_TRUE(PlanUpload(whole.attention, parts, int64_t{1} << 40).empty()) << "one is no plan";
}

TEST(UploadPlan, SequencesAreJoinedWholeOnly) {
  const test::OwnedAttention whole = Dense(4, 2, 2);
  const Slices parts = PartsOf(whole.attention.problem, 1);
  const auto groups = PlanUpload(whole.attention, parts, 40'000);  // more than two heads
  ASSERT_GE(groups.size(), 2u);
  for (const UploadGroup& group : groups) {
    const bool whole_sequences = group.slice.heads_end - group.slice.heads_begin == 2;
    EXPECT_TRUE(whole_sequences || group.slice.batch_end - group.slice.batch_begin == 1);
    const Result<Attention> part = TakeSlice(whole.attention, group.slice);
    ASSERT_TRUE(part.ok());
    EXPECT_EQ(OutputExtents(*part)[0].bytes, ElementsO(part->problem) * 4);
    EXPECT_EQ(OutputExtents(*part)[1].bytes, ElementsLse(part->problem) * 4);
  }
  ExpectParts(groups, parts);
}

TEST(UploadPlan, WhatIsNoRunOfMemoryIsNotDivided) {
  const test::OwnedAttention rows_outside = Dense(3, 2, 2, test::Layout::kBLHD);
  const Problem& p = rows_outside.attention.problem;
  EXPECT_EQ(PlanUpload(rows_outside.attention, PartsOf(p, 1), 1).size(), 3u)
      << "heads are joined to sequences";
  const test::OwnedAttention one = Dense(1, 2, 2, test::Layout::kBLHD);
  EXPECT_TRUE(PlanUpload(one.attention, PartsOf(one.attention.problem, 1), 1).empty());
  const Slices sequences = {{0, 1, 0, 2, 0, 64}, {1, 2, 0, 2, 0, 64}, {2, 3, 0, 2, 0, 64}};
  EXPECT_EQ(PlanUpload(rows_outside.attention, sequences, 1).size(), 3u);

  test::ProblemSpec packed = test::MakeSpec(2, 2, 2, 64, 64, 16, 16);
  packed.problem.packed = true;
  packed.q_lengths = packed.kv_lengths = {30, 34};
  const test::OwnedAttention sequences_packed = test::MakeAttention(packed, 1);
  const int64_t rows = sequences_packed.attention.problem.len_q;
  EXPECT_TRUE(PlanUpload(sequences_packed.attention,
                         Slices{{0, 1, 0, 2, 0, rows}, {1, 2, 0, 2, 0, rows}}, 1)
                  .empty());
}

TEST(UploadPlan, NoPartsNoPlan) {
  const test::OwnedAttention whole = Dense(1, 2, 2);
  EXPECT_TRUE(PlanUpload(whole.attention, {}, 1).empty());
  EXPECT_TRUE(PlanUpload(whole.attention, Slices{WholeSlice(whole.attention.problem)}, 1).empty());
}

}  // namespace
}  // namespace attend
