// SPDX-License-Identifier: Apache-2.0
//
// K and V in pages of a GPU's arena: read by every kernel, appended to by many items of a batch.

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/arena_case.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

class CudaArenaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Backend>> backend = MakeCudaBackend(0, BackendOptions{});
    ASSERT_TRUE(backend.ok()) << backend.status().ToString();
    backend_ = std::move(*backend);
    lane_ = *backend_->MakeLane({1 << 20});
  }

  BatchOutcome Run(std::span<const WorkItem> items) {
    std::promise<BatchOutcome> ended;
    const Status status =
        lane_->Submit(items, [&](BatchOutcome outcome) { ended.set_value(std::move(outcome)); });
    EXPECT_TRUE(status.ok()) << status.ToString();
    return status.ok() ? ended.get_future().get() : BatchOutcome();
  }

  Selection Choose(const OwnedAttention& owned) {
    return *Select(owned.attention.problem, backend_->info(), {}, cuda::TraitsOf(owned.attention));
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Lane> lane_;
};

// Keys that every sequence has.
int64_t LeastKeys(const OwnedAttention& owned) {
  int64_t least = owned.attention.problem.len_k;
  for (int64_t b = 0; b < owned.attention.problem.batch; ++b) {
    least = std::min(least, SequenceOf(owned.attention, b).k_len);
  }
  return least;
}

TEST_F(CudaArenaTest, AppendedKeysAreReadWithTheSameBits) {
  const uint64_t seed = FreshSeed();
  uint64_t next = seed;
  for (int round = 0; round < static_cast<int>(12 * TestScale()) + 1; ++round) {
    std::vector<OwnedAttention> owned;
    std::vector<std::vector<std::byte>> expected;
    while (owned.size() < 20) {
      const ProblemSpec spec = InPages(RandomSpec(next, 3e5), int64_t{16} << (next % 4));
      ++next;
      if (spec.problem.packed || spec.problem.batch == 0) continue;
      OwnedAttention one = MakeAttention(spec, next);
      if (LeastKeys(one) == 0) continue;
      const WorkItem item = one.Item(Choose(one));
      ASSERT_TRUE(Run({&item, 1}).statuses[0].ok());
      expected.push_back(one.OutputBytes());
      owned.push_back(std::move(one));
    }
    std::vector<std::unique_ptr<ArenaCase>> cases;
    std::vector<WorkItem> items;
    for (size_t n = 0; n < owned.size(); ++n) {
      owned[n].ResetOutput();
      const int64_t rows = std::min<int64_t>(LeastKeys(owned[n]), static_cast<int64_t>(n * n % 90));
      cases.push_back(std::make_unique<ArenaCase>(*backend_, owned[n], rows));
      ASSERT_TRUE(cases.back()->status().ok()) << cases.back()->status().ToString();
      items.push_back(cases.back()->Item(Choose(owned[n])));
    }
    const BatchOutcome outcome = Run(items);
    ASSERT_EQ(outcome.statuses.size(), owned.size());
    for (size_t n = 0; n < owned.size(); ++n) {
      ASSERT_TRUE(outcome.statuses[n].ok()) << outcome.statuses[n].ToString();
      EXPECT_EQ(owned[n].OutputBytes(), expected[n])
          << Describe(owned[n].attention.problem) << " ATTEND_TEST_SEED=" << seed;
      const RowsReport report = CheckAllRows(owned[n].attention);
      EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
    }
  }
}

TEST_F(CudaArenaTest, CopiesToFromAndWithinTheArena) {
  constexpr int64_t kBytes = 4096;
  const std::unique_ptr<DeviceArena> arena = *backend_->MakeArena(kBytes);
  EXPECT_FALSE(arena->on_host());
  char* const data = static_cast<char*>(arena->memory().data);
  std::vector<char> sent(kBytes), got(kBytes);
  for (int64_t n = 0; n < kBytes; ++n) sent[n] = static_cast<char>(n * 7);
  const HostPiece in = {sent.data(), data, kBytes};
  ASSERT_TRUE(arena->Copy({&in, 1}).ok());
  const HostPiece within[] = {{data + 1000, data + 3000, 256}, {data, data + 2000, 100}};
  ASSERT_TRUE(arena->Copy(within).ok());
  const HostPiece out = {data, got.data(), kBytes};
  ASSERT_TRUE(arena->Copy({&out, 1}).ok());
  std::copy_n(sent.begin() + 1000, 256, sent.begin() + 3000);
  std::copy_n(sent.begin(), 100, sent.begin() + 2000);
  EXPECT_EQ(got, sent);
}

TEST_F(CudaArenaTest, UnavailableMemoryIsRefused) {
  EXPECT_EQ(backend_->MakeArena(backend_->info().memory_bytes * 2).status().code(),
            Code::kResourceExhausted);
}

}  // namespace
}  // namespace attend::test
