// SPDX-License-Identifier: Apache-2.0
//
// Answers merged from parts over some of the keys, against double precision; and what is cut so.

#include "server/split/split_kv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
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

// All parts merged into `owned`'s output.
Status ComputeByKeys(const OwnedAttention& owned, const std::vector<SplitPiece>& pieces) {
  testing::FakeBackend device;
  const std::unique_ptr<HostPool> pool = *HostPool::Make(device.host_allocator(), kPoolBytes);
  const auto computed = test::ComputeParts(owned, pieces, *pool);
  if (!computed.ok()) return computed.status();
  std::vector<Attention> parts;
  for (const auto& part : *computed) parts.push_back(part->attention);
  MergeKeys(parts, owned.attention);
  return Status();
}

// Few rows, many keys, and whatever else may be cut by keys.
ProblemSpec KeySpec(std::mt19937_64& random) {
  const auto upto = [&](int64_t most) { return static_cast<int64_t>(1 + random() % most); };
  const int64_t heads_kv = upto(3);
  const int64_t len_q = upto(4);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  ProblemSpec spec = MakeSpec(upto(2), heads_kv * upto(2), heads_kv, len_q, 60 + upto(200),
                              upto(24), upto(24), dtypes[random() % 3]);
  Problem& p = spec.problem;
  if (random() % 3 == 0) p.mask.right = static_cast<int64_t>(random() % 3);
  if (random() % 20 == 0) p.mask.right = INT64_MAX;
  if (random() % 3 == 0) p.softcap = 2.0f;
  p.has_bias = random() % 3 == 0;
  p.has_sinks = random() % 3 == 0;
  p.return_lse = random() % 2 == 0;
  const test::Layout layouts[] = {test::Layout::kBHLD, test::Layout::kBLHD, test::Layout::kStrided};
  spec.layout = layouts[random() % 3];
  return spec;
}

TEST(SplitKeys, TheMergedAnswerIsTheWholes) {
  const uint64_t seed = test::FreshSeed();
  const int count = std::max(100, static_cast<int>(2000 * test::TestScale()));
  int planned = 0, masked = 0, with_sinks = 0;
  for (int n = 0; n < count; ++n) {
    std::mt19937_64 random(seed + static_cast<uint64_t>(n));
    const ProblemSpec spec = KeySpec(random);
    OwnedAttention owned = MakeAttention(spec, random());
    const int shares = 2 + static_cast<int>(random() % 4);
    const int64_t multiple = 1 + static_cast<int64_t>(random() % 16);
    const std::vector<SplitPiece> pieces = PlanKeySplit(owned.attention, shares, multiple);
    if (pieces.empty()) continue;
    const std::string what = Describe(spec) + " seed " + std::to_string(seed + n);
    ++planned;
    masked += !spec.problem.mask.unrestricted();
    with_sinks += spec.problem.has_sinks;
    const Status status = ComputeByKeys(owned, pieces);
    ASSERT_TRUE(status.ok()) << status.ToString() << " " << what;
    ASSERT_TRUE(owned.GuardsIntact()) << what;
    const RowsReport report = CheckAllRows(owned.attention, kMergedRoundings);
    ASSERT_TRUE(report.ok) << report.detail << " " << what;
  }
  if (test::TestScale() < 1) return;
  for (const int each : {planned, masked, with_sinks}) EXPECT_GT(each, 50);
}

TEST(SplitKeys, RangesAreAboutEqualAndWhole) {
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 4, 10000, 8, 8), 1);
  const std::vector<SplitPiece> pieces = PlanKeySplit(owned.attention, 3);
  ASSERT_EQ(pieces.size(), 3u);
  int64_t at = 0;
  for (const SplitPiece& piece : pieces) {
    EXPECT_TRUE(piece.some_keys());
    EXPECT_EQ(piece.keys_begin, at);
    EXPECT_EQ(piece.keys_begin % kSplitRows, 0);
    EXPECT_NEAR(static_cast<double>(piece.keys_end - piece.keys_begin), 10000.0 / 3, kSplitRows);
    at = piece.keys_end;
  }
  EXPECT_EQ(at, 10000);
}

// A cut that would hide keys from the first rows moves to where the diagonal begins.
TEST(SplitKeys, ADiagonalLiesInTheLastRange) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 400, 1000, 64, 64);
  spec.problem.mask.right = 0;
  const OwnedAttention owned = MakeAttention(spec, 1);
  EXPECT_TRUE(PlanKeySplit(owned.attention, 2, 10).empty()) << "parts' O are near K and V";
  spec.problem.dim_v = 8;
  OwnedAttention narrow = MakeAttention(spec, 1);
  const std::vector<SplitPiece> four = PlanKeySplit(narrow.attention, 4, 10);
  ASSERT_EQ(four.size(), 4u);
  EXPECT_EQ(four[1].keys_begin, 250);
  EXPECT_EQ(four[2].keys_begin, 500);
  EXPECT_EQ(four[3].keys_begin, 600) << "the first row sees 601";
  EXPECT_TRUE(TakeKeys(narrow.attention, 0, 250).problem.mask.unrestricted());
  EXPECT_FALSE(TakeKeys(narrow.attention, 600, 1000).problem.mask.unrestricted());
  ASSERT_TRUE(ComputeByKeys(narrow, four).ok());
  const RowsReport report = CheckAllRows(narrow.attention, kMergedRoundings);
  EXPECT_TRUE(report.ok) << report.detail;
}

TEST(SplitKeys, AsManySharesAsAreCheapToMerge) {
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 64, 1000, 16, 64), 1);
  EXPECT_EQ(PlanKeySplit(owned.attention, 8, 10).size(), 4u) << "4 * 64 * 64 is a fifth of K and V";
}

bool ByKeys(const ProblemSpec& spec, int shares = 2) {
  const OwnedAttention owned = MakeAttention(spec, 1);
  const std::vector<SplitPiece> pieces = PlanSplitOrKeys(owned.attention, shares, 16);
  EXPECT_FALSE(pieces.empty());
  return !pieces.empty() && pieces[0].some_keys();
}

// Where devices would be sent the same K and V, keys are divided instead, if that saves much more
// than merging costs.
TEST(SplitKeys, KeysAreCutInPlaceOfWhatSharesThem) {
  EXPECT_TRUE(ByKeys(MakeSpec(1, 8, 1, 1, 8192, 32, 32))) << "query heads of one KV head";
  EXPECT_TRUE(ByKeys(MakeSpec(1, 8, 1, 1, 8192, 32, 32), 4));
  EXPECT_TRUE(ByKeys(MakeSpec(1, 1, 1, 32, 65536, 8, 8))) << "rows of one head";
  EXPECT_TRUE(ByKeys(MakeSpec(1, 12, 3, 1, 8192, 32, 32))) << "the middle one of three KV heads";
  ProblemSpec rows_outside = MakeSpec(1, 2, 2, 32, 65536, 8, 8);
  rows_outside.layout = test::Layout::kBLHD;
  EXPECT_TRUE(ByKeys(rows_outside)) << "rows of all heads";
  EXPECT_FALSE(ByKeys(MakeSpec(1, 8, 2, 1, 8192, 32, 32))) << "a KV head for each";
  EXPECT_FALSE(ByKeys(MakeSpec(2, 8, 1, 1, 8192, 32, 32))) << "a sequence for each";
  EXPECT_FALSE(ByKeys(MakeSpec(1, 8, 1, 16, 8192, 32, 32))) << "merging would take longer";
  EXPECT_FALSE(ByKeys(MakeSpec(1, 15, 15, 32, 16384, 8, 8))) << "one of fifteen is shared";
  ProblemSpec uncut = MakeSpec(1, 8, 1, 1, 8192, 32, 32);
  uncut.problem.has_alibi = true;
  EXPECT_FALSE(ByKeys(uncut)) << "whose keys cannot be cut";
}

TEST(SplitKeys, WhatCannotBeCutIsNot) {
  const ProblemSpec can = MakeSpec(1, 1, 1, 4, 4096, 8, 8);
  const auto plan = [](const ProblemSpec& spec, int shares = 2) {
    return PlanKeySplit(MakeAttention(spec, 1).attention, shares).size();
  };
  EXPECT_EQ(plan(can), 2u);
  EXPECT_EQ(plan(can, 1), 0u);
  ProblemSpec spec = can;
  spec.problem.has_alibi = true;
  EXPECT_EQ(plan(spec), 0u) << "its distances would count from elsewhere";
  spec = can;
  spec.problem.mask = {Alignment::kBottomRight, 100, 0};
  EXPECT_EQ(plan(spec), 0u);
  spec.problem.mask = {Alignment::kTopLeft, -1, 0};
  EXPECT_EQ(plan(spec), 0u);
  spec = can;
  spec.q_lengths = {4};
  spec.kv_lengths = {3000};
  EXPECT_EQ(plan(spec), 0u);
  EXPECT_EQ(plan(MakeSpec(1, 1, 1, 4, 600, 8, 8)), 0u) << "one range of 512 keys is too much";
  EXPECT_EQ(plan(MakeSpec(1, 1, 1, 0, 4096, 8, 8)), 0u);
}

TEST(SplitKeys, RowsWithoutKeysAreZero) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, 64, 4, 4), 1);
  owned.attention.problem.return_lse = true;
  float lse = 1;
  owned.attention.lse = &lse;
  float o[4] = {1, 2, 3, 4};
  float none = -std::numeric_limits<float>::infinity();
  Attention part = owned.attention;
  part.o = {o, 4, 4, 4};
  part.lse = &none;
  MergeKeys(std::vector<Attention>{part, part}, owned.attention);
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT_EQ(static_cast<const float*>(owned.attention.o.data)[d], 0.0f);
  }
  EXPECT_EQ(lse, none);
}

}  // namespace
}  // namespace attend
