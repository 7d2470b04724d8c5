// SPDX-License-Identifier: Apache-2.0
//
// Loss of the device's context. Needs its own process: nothing works on the GPU afterwards.

#include <gtest/gtest.h>

#include <future>

#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

TEST(CudaLost, EveryBatchEndsAndLaterOnesAreRefused) {
  Result<std::unique_ptr<Backend>> backend = MakeCudaBackend(0, BackendOptions{});
  ASSERT_TRUE(backend.ok()) << backend.status().ToString();
  Result<std::unique_ptr<Lane>> lane = (*backend)->MakeLane({1 << 20});
  Result<std::unique_ptr<Lane>> other = (*backend)->MakeLane({1 << 20});
  ASSERT_TRUE(lane.ok() && other.ok());

  ProblemSpec spec = MakeSpec(1, 1, 1, 8, 8, 64, 64);
  spec.problem.packed = true;
  spec.q_lengths = {8};
  spec.kv_lengths = {8};
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  // Offsets that no validation would accept: rows far outside any memory.
  auto* offsets = const_cast<int64_t*>(owned.attention.q_offsets);
  offsets[0] = int64_t{1} << 40;
  offsets[1] = offsets[0] + 8;
  const Result<Selection> selection = Select(owned.attention.problem, (*backend)->info());
  ASSERT_TRUE(selection.ok());
  const WorkItem item = owned.Item(*selection);

  std::promise<BatchOutcome> ended;
  ASSERT_TRUE(
      (*lane)
          ->Submit({&item, 1}, [&](BatchOutcome outcome) { ended.set_value(std::move(outcome)); })
          .ok());
  const BatchOutcome outcome = ended.get_future().get();
  EXPECT_TRUE(outcome.device_lost);
  ASSERT_EQ(outcome.statuses.size(), 1u);
  EXPECT_EQ(outcome.statuses[0].code(), Code::kInternal);
  EXPECT_NE(outcome.statuses[0].message().find("cudaError"), std::string::npos)
      << outcome.statuses[0].message();

  for (Lane* each : {lane->get(), other->get()}) {
    const Status status = each->Submit({&item, 1}, [](BatchOutcome) { FAIL() << "was refused"; });
    EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  }
}

}  // namespace
}  // namespace attend::test
