// SPDX-License-Identifier: Apache-2.0
//
// Backward passes and forward passes in one batch of a lane.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/gradient_terms.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/lane_harness.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// A backward pass as a lane receives it. O and LSE are the reference's.
struct BackwardCase {
  explicit BackwardCase(const ProblemSpec& spec, uint64_t seed) : owned(MakeAttention(spec, seed)) {
    CpuReference(owned.attention);
    gradients = std::make_unique<OwnedGradients>(owned.attention, seed + 1);
  }

  WorkItem Item(const Selection& selection) {
    WorkItem item{owned.attention, selection, {owned.input, owned.output}, {}};
    item.gradients = gradients->get();
    std::vector<std::vector<std::byte>>& blocks = gradients->blocks();
    for (size_t n = 0; n < blocks.size(); ++n) {
      const HostSpan span{blocks[n].data(), static_cast<int64_t>(blocks[n].size())};
      const bool comes_in = n == 3 || n == 4;  // dO and dLSE
      (comes_in ? item.inputs : item.outputs).Add(span);
    }
    return item;
  }

  OwnedAttention owned;
  std::unique_ptr<OwnedGradients> gradients;
};

TEST(CudaLaneBackward, RunsAmongForwardPasses) {
  const uint64_t seed = FreshSeed();
  const Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
  ASSERT_TRUE(harness.ok()) << harness.status().ToString();
  const Result<std::unique_ptr<Lane>> lane = (*harness)->MakeLane(cuda::LaneTuning{});
  ASSERT_TRUE(lane.ok()) << lane.status().ToString();
  for (uint64_t round = 0; round < static_cast<uint64_t>(20 * TestScale()) + 1; ++round) {
    std::vector<std::unique_ptr<BackwardCase>> cases;
    std::vector<OwnedAttention> forward;
    std::vector<WorkItem> items;
    std::vector<Selection> chosen;
    for (uint64_t n = 0; n < 4; ++n) {
      ProblemSpec spec = n % 2 == 0 ? RandomSpec(seed + 10 * round + n, 1e5)
                                    : MakeSpec(2, 4, 2, 70, 90, 64, 64, DType::kBFloat16);
      if ((seed + n) % 3 != 0) spec = WithDropout(std::move(spec), seed + n);
      spec.problem.return_lse = true;
      cases.push_back(std::make_unique<BackwardCase>(spec, seed + n));
      const Attention& a = cases.back()->owned.attention;
      const Result<Selection> selection =
          SelectBackward(a.problem, (*harness)->info(), {},
                         {.not_tma = cuda::WhyNotTma(a, cases.back()->gradients->get())});
      ASSERT_TRUE(selection.ok()) << selection.status().ToString();
      chosen.push_back(*selection);
      items.push_back(cases.back()->Item(*selection));
      forward.push_back(MakeAttention(RandomSpec(seed + 10 * round + n + 5, 1e5), seed));
      items.push_back(forward.back().Item(*(*harness)->Choose(forward.back().attention)));
    }
    const Result<BatchOutcome> outcome = RunBatch(lane->get(), items);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    for (size_t n = 0; n < cases.size(); ++n) {
      ASSERT_TRUE(outcome->statuses[2 * n].ok()) << outcome->statuses[2 * n].ToString();
      ASSERT_TRUE(outcome->statuses[2 * n + 1].ok());
      const Attention& a = cases[n]->owned.attention;
      const Gradients& g = cases[n]->gradients->get();
      const bool exact = chosen[n].kernel == KernelId::kCudaFlashFp32;
      EXPECT_EQ(GradientsJudge(a, g, exact ? DType::kFloat32 : a.problem.dtype).Fault(g), "")
          << Describe(a.problem) << " ATTEND_TEST_SEED=" << seed;
      const RowsReport report =
          CheckRows(forward[n].attention, SampleRows(forward[n].attention, 1, 1e7));
      EXPECT_TRUE(report.ok) << report.detail;
    }
  }
}

// With room for only three numbers per row, it neither needs nor uses a neighbour's workspace.
TEST(CudaLaneBackward, ASmallWorkspaceIsEnough) {
  const uint64_t seed = FreshSeed();
  const Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
  ASSERT_TRUE(harness.ok()) << harness.status().ToString();
  const Result<std::unique_ptr<Lane>> lane = (*harness)->MakeLane(cuda::LaneTuning{});
  ASSERT_TRUE(lane.ok()) << lane.status().ToString();
  ProblemSpec spec = MakeSpec(2, 4, 2, 170, 390, 64, 64, DType::kBFloat16);
  spec.problem.return_lse = true;
  DeviceInfo small = (*harness)->info();
  small.workspace_bytes_max = *GradientTermsBytes(spec.problem);
  std::vector<std::byte> alone;
  for (const bool beside : {false, true}) {
    BackwardCase narrow(spec, seed), roomy(spec, seed);
    std::vector<WorkItem> items = {narrow.Item(*SelectBackward(spec.problem, small))};
    if (beside) items.push_back(roomy.Item(*SelectBackward(spec.problem, (*harness)->info())));
    const Result<BatchOutcome> outcome = RunBatch(lane->get(), items);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    for (const Status& status : outcome->statuses) ASSERT_TRUE(status.ok()) << status.ToString();
    const Gradients& g = narrow.gradients->get();
    EXPECT_EQ(GradientsJudge(narrow.owned.attention, g, DType::kBFloat16).Fault(g), "");
    if (!beside) alone = narrow.gradients->Bytes();
    EXPECT_EQ(narrow.gradients->Bytes(), alone);
  }
}

// Items that share a launch are launched one by one if it is refused, so that only the refused one
// fails.
TEST(CudaLaneBackward, ARefusedItemOfASharedLaunchFailsAlone) {
  const uint64_t seed = FreshSeed();
  const Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
  ASSERT_TRUE(harness.ok()) << harness.status().ToString();
  const Result<std::unique_ptr<Lane>> lane = (*harness)->MakeLane(cuda::LaneTuning{});
  ASSERT_TRUE(lane.ok()) << lane.status().ToString();
  ProblemSpec spec = MakeSpec(1, 2, 2, 130, 70, 64, 64, DType::kFloat16);
  spec.problem.return_lse = true;
  std::vector<std::unique_ptr<BackwardCase>> cases;
  std::vector<WorkItem> items;
  for (uint64_t n = 0; n < 3; ++n) {
    cases.push_back(std::make_unique<BackwardCase>(spec, seed + n));
    Selection selection = *SelectBackward(spec.problem, (*harness)->info());
    if (n == 1) selection.kernel = KernelId::kCudaNaive;  // has no backward pass
    items.push_back(cases.back()->Item(selection));
  }
  const Result<BatchOutcome> outcome = RunBatch(lane->get(), items);
  ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
  for (size_t n = 0; n < cases.size(); ++n) {
    SCOPED_TRACE("item " + std::to_string(n) + " ATTEND_TEST_SEED=" + std::to_string(seed));
    if (n == 1) {
      EXPECT_EQ(outcome->statuses[n].code(), Code::kUnimplemented);
      continue;
    }
    ASSERT_TRUE(outcome->statuses[n].ok()) << outcome->statuses[n].ToString();
    const GradientsJudge judge(cases[n]->owned.attention, cases[n]->gradients->get(),
                               DType::kFloat16);
    EXPECT_EQ(judge.Fault(cases[n]->gradients->get()), "");
  }
}

}  // namespace
}  // namespace attend::test
