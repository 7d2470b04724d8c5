// SPDX-License-Identifier: Apache-2.0
//
// Loss of the device's context while parts of a large item follow each other. Needs its own
// process: nothing works on the GPU afterwards.

#include <gtest/gtest.h>

#include "tests/kernels/support/lane_harness.h"

namespace attend::test {
namespace {

TEST(CudaLost, AllPartsEndAndLaterBatchesAreRefused) {
  const Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
  ASSERT_TRUE(harness.ok()) << harness.status().ToString();
  cuda::LaneTuning tuning;
  tuning.cut.parts_min = 12;
  const Result<std::unique_ptr<Lane>> lane = (*harness)->MakeLane(tuning);
  ASSERT_TRUE(lane.ok()) << lane.status().ToString();

  ProblemSpec spec = MakeSpec(12, 1, 1, 8, 8, 64, 64);
  spec.q_lengths = spec.kv_lengths = std::vector<int64_t>(12, 8);
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  // A length that no validation would accept: rows far outside any memory, in the second part.
  const_cast<int64_t*>(owned.attention.kv_lengths)[1] = int64_t{1} << 30;
  const PinnedAttention pinned(&owned, &(*harness)->pinned());
  const Result<Selection> selection = (*harness)->Choose(owned.attention);
  ASSERT_TRUE(selection.ok());
  const WorkItem item = pinned.Item(*selection);

  const Result<BatchOutcome> outcome = RunBatch(lane->get(), {&item, 1});
  ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
  EXPECT_TRUE(outcome->device_lost);
  ASSERT_EQ(outcome->statuses.size(), 1u);
  EXPECT_EQ(outcome->statuses[0].code(), Code::kInternal);
  EXPECT_NE(outcome->statuses[0].message().find("cudaError"), std::string::npos)
      << outcome->statuses[0].message();
  EXPECT_EQ(RunBatch(lane->get(), {&item, 1}).status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace attend::test
