// SPDX-License-Identifier: Apache-2.0
//
// Keys that a check fetches from a device: those of the rows, no more, and the same verdict.

#include "server/engine/fetched_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

// An attention that is computed, with its pages in an arena and on the host.
struct InArena {
  explicit InArena(uint64_t seed)
      : owned(test::MakeAttention(Spec(seed), seed)), arena(owned.input.bytes, false) {
    CpuReference(owned.attention);
    std::memcpy(arena.memory().data, owned.input.data, static_cast<size_t>(owned.input.bytes));
    attention = owned.attention;
    attention.k.data = Moved(attention.k.data);
    attention.v.data = Moved(attention.v.data);
  }
  static test::ProblemSpec Spec(uint64_t seed) {
    for (;; seed += 1000) {
      const test::ProblemSpec spec = test::InPages(test::RandomSpec(seed, 3e5), 16);
      const Problem& p = spec.problem;
      const bool some = p.batch > 0 && p.len_q > 0 && p.len_k > 0 && spec.kv_lengths.empty();
      if (!p.packed && some) return spec;
    }
  }
  const void* Moved(const void* data) const {
    return static_cast<char*>(arena.memory().data) +
           (static_cast<const char*>(data) - static_cast<const char*>(owned.input.data));
  }
  // Of the KV heads that the rows see, whole rows of K and V.
  int64_t BytesSeen(const std::vector<RowId>& rows) const {
    const Problem& p = attention.problem;
    std::set<std::pair<int64_t, int64_t>> heads;
    for (const RowId& row : rows) heads.emplace(row.b, row.h / p.group());
    int64_t bytes = 0;
    for (const auto& [b, h] : heads) {
      bytes += SequenceOf(attention, b).k_len * (p.dim + p.dim_v) * DTypeBytes(p.dtype);
    }
    return bytes;
  }

  test::OwnedAttention owned;
  test::TestArena arena;
  Attention attention;
};

TEST(FetchedKeys, GiveTheSameVerdictFromTheHeadsThatRowsSee) {
  const uint64_t seed = test::FreshSeed();
  for (uint64_t n = 0; n < 60; ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " n " + std::to_string(n));
    InArena far(seed + n);
    const std::vector<RowId> rows =
        SampleRows(far.attention, n, 3 * CheckWork(far.attention.problem));
    const Result<FetchedKeys> keys =
        FetchedKeys::Fetch(far.attention, far.arena, rows, int64_t{1} << 40);
    ASSERT_TRUE(keys.ok()) << keys.status().ToString();
    EXPECT_EQ(far.arena.copied_bytes(), far.BytesSeen(rows));
    // What is on the host is all that is read.
    std::memset(far.arena.memory().data, 0xff, static_cast<size_t>(far.arena.memory().bytes));
    const RowsReport fetched = CheckRows(keys->attention(), rows);
    const RowsReport whole = CheckRows(far.owned.attention, rows);
    EXPECT_TRUE(fetched.ok) << fetched.detail;
    EXPECT_EQ(fetched.max_abs_error, whole.max_abs_error);
    EXPECT_EQ(fetched.bound, whole.bound);
  }
}

TEST(FetchedKeys, RowsAreChosenWithoutV) {
  InArena far(test::FreshSeed());
  Attention blind = far.attention;
  blind.v.data = nullptr;
  const double all = static_cast<double>(CountRows(blind)) * CheckWork(blind.problem);
  EXPECT_EQ(std::ssize(SampleRows(blind, 1, 2 * all)), CountRows(blind));
  EXPECT_GE(std::ssize(SampleRows(blind, 1, CheckWork(blind.problem))), 1);
}

TEST(FetchedKeys, MoreThanACheckMayCopyIsRefused) {
  InArena far(test::FreshSeed());
  const std::vector<RowId> rows = {{0, 0, 0}};
  const int64_t bytes = far.BytesSeen(rows);
  const Status status = FetchedKeys::Fetch(far.attention, far.arena, rows, bytes - 1).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("may copy at most " + std::to_string(bytes - 1)));
  EXPECT_EQ(far.arena.copied_bytes(), 0);
}

TEST(FetchedKeys, ALostDeviceIsSaid) {
  InArena far(test::FreshSeed());
  far.arena.Lose();
  const std::vector<RowId> rows = {{0, 0, 0}};
  EXPECT_EQ(FetchedKeys::Fetch(far.attention, far.arena, rows, 1 << 30).status().code(),
            Code::kUnavailable);
}

}  // namespace
}  // namespace attend
