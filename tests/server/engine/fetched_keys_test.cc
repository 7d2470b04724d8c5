// SPDX-License-Identifier: Apache-2.0
//
// Keys that a check fetches from a device: only those that the checked rows see, and the verdict
// does not change.

#include "server/engine/fetched_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

using ::testing::HasSubstr;

// A computed attention whose pages are both in an arena and on the host.
struct InArena {
  explicit InArena(uint64_t seed) : InArena(Spec(seed), seed) {}
  InArena(const test::ProblemSpec& spec, uint64_t seed)
      : owned(test::MakeAttention(spec, seed)), arena(owned.input.bytes, false) {
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
  // Sequence, KV head and index of each page with a key that a row sees.
  std::set<std::tuple<int64_t, int64_t, int64_t>> PagesSeen(const std::vector<RowId>& rows) const {
    const Problem& p = attention.problem;
    std::set<std::tuple<int64_t, int64_t, int64_t>> pages;
    for (const RowId& row : rows) {
      const Sequence s = SequenceOf(attention, row.b);
      if (row.i >= s.q_len) continue;
      for (int64_t j = 0; j < s.k_len; ++j) {
        const KeyRange keys = VisibleKeys(p.mask, s, row.i);
        if (j < keys.begin || j >= keys.end) continue;
        pages.emplace(row.b, row.h / p.group(), j / p.page_rows);
      }
    }
    return pages;
  }
  // Bytes of those pages' rows that lie within the sequence.
  int64_t BytesSeen(const std::vector<RowId>& rows) const {
    const int64_t page_rows = attention.problem.page_rows;
    int64_t keys = 0;
    for (const auto& [b, h, n] : PagesSeen(rows)) {
      keys += std::min(page_rows, SequenceOf(attention, b).k_len - n * page_rows);
    }
    return keys * BytesOfKey();
  }
  int64_t PageBytes() const { return attention.problem.page_rows * BytesOfKey(); }
  int64_t BytesOfKey() const {
    const Problem& p = attention.problem;
    return (p.dim + p.dim_v) * DTypeBytes(p.dtype);
  }

  Result<FetchedKeys> Fetch(const std::vector<RowId>& rows, HostPool& pool,
                            int64_t bytes_max = int64_t{1} << 40) {
    return FetchedKeys::Fetch(attention, arena, rows, pool, 0, bytes_max);
  }

  test::OwnedAttention owned;
  test::TestArena arena;
  Attention attention;
};

class FetchedKeysTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBudget = int64_t{64} << 20;

  static std::unique_ptr<HostPool> MakePool(HostAllocator& allocator) {
    Result<std::unique_ptr<HostPool>> pool = HostPool::Make(allocator, kBudget, {1});
    EXPECT_TRUE(pool.ok());
    // NaN wherever nothing is written.
    const Result<HostBlock> all = (*pool)->Take(0, kBudget);
    std::memset(all->data(), 0xff, static_cast<size_t>(kBudget));
    return *std::move(pool);
  }

  test::FakeBackend device_;
  const std::unique_ptr<HostPool> pool_ = MakePool(device_.host_allocator());
};

TEST_F(FetchedKeysTest, GiveTheSameVerdictAsAllPages) {
  const uint64_t seed = test::FreshSeed();
  for (uint64_t n = 0; n < 60; ++n) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " n " + std::to_string(n));
    InArena far(seed + n);
    const std::vector<RowId> rows =
        SampleRows(far.attention, n, 3 * CheckWork(far.attention.problem));
    const Result<FetchedKeys> keys = far.Fetch(rows, *pool_);
    ASSERT_TRUE(keys.ok()) << keys.status().ToString();
    EXPECT_EQ(far.arena.copied_bytes(), far.BytesSeen(rows));
    EXPECT_EQ(pool_->used_bytes(), HostPool::BlockBytes(keys->bytes()));
    EXPECT_LE(keys->bytes(), 2 * std::ssize(far.PagesSeen(rows)) * far.PageBytes());
    // The check reads nothing but the fetched copy.
    std::memset(far.arena.memory().data, 0xff, static_cast<size_t>(far.arena.memory().bytes));
    const RowsReport fetched = CheckRows(keys->attention(), rows);
    const RowsReport whole = CheckRows(far.owned.attention, rows);
    EXPECT_TRUE(fetched.ok) << fetched.detail;
    EXPECT_EQ(fetched.max_abs_error, whole.max_abs_error);
    EXPECT_EQ(fetched.bound, whole.bound);
  }
}

// Nor do they take address space.
TEST_F(FetchedKeysTest, OtherHeadsAndPagesTakeNoMemory) {
  constexpr int64_t kHeads = 8;
  constexpr int64_t kPages = 5;
  test::ProblemSpec spec =
      test::InPages(test::MakeSpec(2, 2 * kHeads, kHeads, 1, 16 * kPages, 8, 8), 16);
  InArena far(spec, test::FreshSeed());
  struct Case {
    std::vector<int64_t> heads;  // query heads, in sequence 1
    int64_t places;              // slots for their pages
  };
  for (const Case& each : {Case{{14}, kPages}, Case{{2, 3}, kPages}, Case{{2, 4}, 2 * kPages},
                           Case{{0, 6}, 2 * 6 - 1}}) {
    std::vector<RowId> rows;
    for (const int64_t h : each.heads) rows.push_back({1, h, 0});
    const Result<FetchedKeys> keys = far.Fetch(rows, *pool_);
    ASSERT_TRUE(keys.ok());
    EXPECT_EQ(keys->bytes(), each.places * far.PageBytes()) << each.heads.back();
    EXPECT_EQ(pool_->used_bytes(), HostPool::BlockBytes(keys->bytes()));
    EXPECT_TRUE(CheckRows(keys->attention(), rows).ok);
  }
  EXPECT_EQ(pool_->used_bytes(), 0);
  // A row whose window begins after most pages.
  spec.problem.mask.left = 16;
  InArena window(spec, test::FreshSeed());
  const Result<FetchedKeys> keys = window.Fetch({{0, 0, 0}}, *pool_);
  ASSERT_TRUE(keys.ok());
  EXPECT_EQ(keys->bytes(), 2 * window.PageBytes());
}

TEST_F(FetchedKeysTest, AFullBudgetIsReported) {
  InArena far(test::InPages(test::MakeSpec(1, 1, 1, 1, 40, 8, 8), 16), test::FreshSeed());
  const Result<HostBlock> most = pool_->Take(0, kBudget - 256);
  ASSERT_TRUE(most.ok());
  const Status status = far.Fetch({{0, 0, 0}}, *pool_).status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("check: tensor memory: "));
  EXPECT_EQ(far.arena.copied_bytes(), 0);
}

TEST_F(FetchedKeysTest, RowsAreChosenWithoutV) {
  InArena far(test::FreshSeed());
  Attention blind = far.attention;
  blind.v.data = nullptr;
  const double all = static_cast<double>(CountRows(blind)) * CheckWork(blind.problem);
  EXPECT_EQ(std::ssize(SampleRows(blind, 1, 2 * all)), CountRows(blind));
  EXPECT_GE(std::ssize(SampleRows(blind, 1, CheckWork(blind.problem))), 1);
}

TEST_F(FetchedKeysTest, CopyingMoreThanTheLimitIsRefused) {
  InArena far(test::InPages(test::MakeSpec(1, 1, 1, 1, 40, 8, 8), 16), test::FreshSeed());
  const std::vector<RowId> rows = {{0, 0, 0}};
  const int64_t bytes = 3 * far.PageBytes();
  EXPECT_TRUE(far.Fetch(rows, *pool_, bytes).ok());
  const Status status = far.Fetch(rows, *pool_, bytes - 1).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("may copy at most " + std::to_string(bytes - 1)));
  EXPECT_EQ(far.arena.copied_bytes(), 40 * far.BytesOfKey()) << "nothing more";
}

TEST_F(FetchedKeysTest, ALostDeviceIsReported) {
  InArena far(test::FreshSeed());
  far.arena.Lose();
  const std::vector<RowId> rows = {{0, 0, 0}};
  EXPECT_EQ(far.Fetch(rows, *pool_).status().code(), Code::kUnavailable);
  EXPECT_EQ(pool_->used_bytes(), 0);
}

}  // namespace
}  // namespace attend
