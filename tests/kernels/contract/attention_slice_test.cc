// SPDX-License-Identifier: Apache-2.0

#include "kernels/contract/attention_slice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// [0, size) in one to three parts.
std::vector<int64_t> Cuts(int64_t size, bool may_cut, std::mt19937_64& random) {
  std::vector<int64_t> cuts = {0, size};
  for (int n = 0; may_cut && n < 2; ++n) {
    cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(size + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

struct Grid {
  std::vector<int64_t> batch, heads, rows;
};

void ExpectSlicesAreTheWhole(OwnedAttention& owned, const Grid& grid, const std::string& what) {
  const Attention& a = owned.attention;
  owned.ResetOutput();
  CpuReference(a);
  const std::vector<std::byte> whole = owned.OutputBytes();
  owned.ResetOutput();
  for (size_t b = 0; b + 1 < grid.batch.size(); ++b) {
    for (size_t h = 0; h + 1 < grid.heads.size(); ++h) {
      for (size_t r = 0; r + 1 < grid.rows.size(); ++r) {
        const Result<Attention> part =
            TakeSlice(a, {grid.batch[b], grid.batch[b + 1], grid.heads[h], grid.heads[h + 1],
                          grid.rows[r], grid.rows[r + 1]});
        ASSERT_TRUE(part.ok()) << part.status().ToString() << " " << what;
        ASSERT_TRUE(Check(part->problem).ok()) << Describe(part->problem) << " of " << what;
        CpuReference(*part);
      }
    }
  }
  EXPECT_TRUE(owned.GuardsIntact()) << what;
  EXPECT_EQ(whole, owned.OutputBytes()) << what;
}

TEST(TakeSlice, PartsAreTheWholeBitForBit) {
  const uint64_t seed = FreshSeed();
  int rows_cut = 0;
  const int count = std::max(50, static_cast<int>(1000 * TestScale()));
  for (int n = 0; n < count; ++n) {
    std::mt19937_64 random(seed + static_cast<uint64_t>(n));
    ProblemSpec spec = RandomSpec(random(), 1e5);
    if (n % 2 == 1) spec = WithDropout(std::move(spec), random());
    OwnedAttention owned = MakeAttention(spec, random());
    const Problem& p = owned.attention.problem;
    if (p.batch == 0 || p.len_q == 0) continue;
    const bool may_cut_rows = RowsCanBeSliced(owned.attention);
    const Grid grid = {Cuts(p.batch, true, random), Cuts(p.heads_kv, true, random),
                       Cuts(p.len_q, may_cut_rows, random)};
    rows_cut += grid.rows.size() > 2 ? 1 : 0;
    ExpectSlicesAreTheWhole(owned, grid, Describe(spec) + " seed " + std::to_string(seed + n));
    if (HasFailure()) return;
  }
  // Sanitizers run fewer problems, which need not meet every case.
  if (TestScale() < 1) return;
  EXPECT_GT(rows_cut, count / 50);
}

// Problems with rows that see no key, with more queries than keys, or with a window on the left.
TEST(TakeSlice, RowsCanBeCutUnderEveryMaskThatAllowsIt) {
  for (const auto alignment : {Alignment::kBottomRight, Alignment::kTopLeft}) {
    for (const int64_t left : {int64_t{-1}, int64_t{0}, int64_t{3}}) {
      for (const auto& [len_q, len_k] :
           std::vector<std::pair<int64_t, int64_t>>{{9, 9}, {9, 20}, {20, 9}, {9, 0}}) {
        ProblemSpec spec = MakeSpec(1, 2, 1, len_q, len_k, 4, 4);
        spec.problem.mask = {alignment, left, 0};
        spec.problem.has_alibi = true;
        OwnedAttention owned = MakeAttention(spec, FreshSeed());
        if (alignment == Alignment::kTopLeft && len_q > len_k) {
          EXPECT_FALSE(RowsCanBeSliced(owned.attention));
          continue;
        }
        ASSERT_TRUE(RowsCanBeSliced(owned.attention)) << Describe(spec);
        Grid grid = {{0, 1}, {0, 1}, {}};
        for (int64_t row = 0; row <= len_q; ++row) grid.rows.push_back(row);
        ExpectSlicesAreTheWhole(owned, grid, Describe(spec));
      }
    }
  }
}

TEST(TakeSlice, RefusesInvalidParts) {
  const auto refused = [](const ProblemSpec& spec, const AttentionSlice& slice, const char* what) {
    const OwnedAttention owned = MakeAttention(spec, FreshSeed());
    const Status status = TakeSlice(owned.attention, slice).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
  };
  ProblemSpec spec = MakeSpec(2, 6, 3, 5, 7, 8, 8);
  refused(spec, {-1, 2, 0, 3, 0, 5}, "sequences are [-1, 2)");
  refused(spec, {0, 3, 0, 3, 0, 5}, "sequences are [0, 3)");
  refused(spec, {0, 2, 1, 1, 0, 5}, "KV heads are [1, 1)");
  refused(spec, {0, 2, 0, 6, 0, 5}, "KV heads are [0, 6)");
  refused(spec, {0, 2, 0, 3, 2, 6}, "query rows are [2, 6)");
  spec.problem.mask = {Alignment::kBottomRight, 2, 2};
  refused(spec, {0, 2, 0, 3, 0, 4}, "must be all 5");
  spec.problem.mask = {};
  spec.q_lengths = {5, 3};
  spec.kv_lengths = {7, 7};
  refused(spec, {0, 2, 0, 3, 0, 4}, "must be all 5");
}

}  // namespace
}  // namespace attend::test
