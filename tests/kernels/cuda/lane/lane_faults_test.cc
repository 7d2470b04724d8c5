// SPDX-License-Identifier: Apache-2.0
//
// The N-th call of every CUDA function on a batch's way fails, for every N: each item ends with its
// own bits or one status that names CUDA's error, and the lane computes the next batch as ever.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/kernels/support/cuda_faults.h"
#include "tests/kernels/support/lane_harness.h"

namespace attend::test {
namespace {

using testing::IsSupersetOf;

// More calls of one function than any batch here makes; polling alone has no end.
constexpr int64_t kCallsMost = 200;
constexpr int64_t kPollsMost = 3;

bool IsPoll(const std::string& function) { return function == "cudaEventQuery"; }

cudaError_t ErrorOf(const std::string& function) {
  const bool allocates = function.find("Alloc") != std::string::npos;
  return allocates ? cudaErrorMemoryAllocation : cudaErrorInvalidValue;
}

// Attentions in page-locked memory, and the bits of their answers.
class Items {
 public:
  Items(LaneHarness* harness, const std::vector<ProblemSpec>& specs, uint64_t seed) {
    owned_.reserve(specs.size());  // PinnedAttention keeps pointers
    for (const ProblemSpec& spec : specs) {
      owned_.push_back(MakeAttention(spec, seed + owned_.size()));
      pinned_.push_back(std::make_unique<PinnedAttention>(&owned_.back(), &harness->pinned()));
      const Result<Selection> selection = harness->Choose(owned_.back().attention);
      EXPECT_TRUE(selection.ok()) << selection.status().ToString();
      if (selection.ok()) items_.push_back(pinned_.back()->Item(*selection));
    }
  }

  // The bits that every later answer must have.
  void Learn(Lane* lane) {
    ASSERT_EQ(Run(lane), static_cast<int>(items_.size()));
    for (const OwnedAttention& each : owned_) wanted_.push_back(each.OutputBytes());
  }

  // The number computed with the right bits; the others report their failure. -1: the batch was
  // refused, with a reason.
  int Run(Lane* lane) {
    for (OwnedAttention& each : owned_) each.ResetOutput();
    const Result<BatchOutcome> outcome = RunBatch(lane, items_);
    if (!outcome.ok()) {
      EXPECT_NE(outcome.status().message().find("cudaError"), std::string::npos)
          << outcome.status().ToString();
      return -1;
    }
    EXPECT_FALSE(outcome->device_lost);
    int computed = 0;
    for (size_t n = 0; n < items_.size(); ++n) {
      const Status& status = outcome->statuses[n];
      if (!status.ok()) {
        EXPECT_NE(status.message().find("cudaError"), std::string::npos) << status.ToString();
        continue;
      }
      pinned_[n]->Fetch();
      if (!wanted_.empty()) {
        EXPECT_TRUE(owned_[n].OutputBytes() == wanted_[n]) << "item " << n << " has other bits";
      }
      ++computed;
    }
    return computed;
  }

  int size() const { return static_cast<int>(items_.size()); }

 private:
  std::vector<OwnedAttention> owned_;
  std::vector<std::unique_ptr<PinnedAttention>> pinned_;
  std::vector<WorkItem> items_;
  std::vector<std::vector<std::byte>> wanted_;
};

class CudaLaneFaultsTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
    ASSERT_TRUE(harness.ok()) << harness.status().ToString();
    harness_ = std::move(*harness);
  }
  void TearDown() override { FailCudaCall("", 0, cudaSuccess); }

  void Sweep(const cuda::LaneTuning& tuning, const std::vector<ProblemSpec>& specs) {
    const uint64_t seed = FreshSeed();
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
    Result<std::unique_ptr<Lane>> lane = harness_->MakeLane(tuning);
    ASSERT_TRUE(lane.ok()) << lane.status().ToString();
    Items items(harness_.get(), specs, seed);
    ASSERT_NO_FATAL_FAILURE(items.Learn(lane->get()));
    int64_t met = 0;
    std::set<std::string> failing;
    for (const std::string& function : WrappedCudaCalls()) {
      for (int64_t n = 1; n <= (IsPoll(function) ? kPollsMost : kCallsMost); ++n) {
        SCOPED_TRACE(function + ", call " + std::to_string(n));
        FailCudaCall(function, n, ErrorOf(function));
        if (items.Run(lane->get()) < items.size()) failing.insert(function);
        const bool more = CudaFaultWasMet();
        FailCudaCall("", 0, cudaSuccess);
        ASSERT_EQ(items.Run(lane->get()), items.size()) << "the batch after a fault";
        if (!more) break;
        ++met;
      }
    }
    EXPECT_GT(met, 10);
    // The functions that each of these batches needs; its outputs have gaps and are cleared. A
    // failed launch is tried again, item by item, and polling may not occur.
    EXPECT_THAT(failing, IsSupersetOf({"cudaSetDevice", "cudaMemsetAsync", "cudaEventRecord"}));
    RecordProperty("met", std::to_string(met));
  }

  std::unique_ptr<LaneHarness> harness_;
};

TEST_F(CudaLaneFaultsTest, FailuresEndSmallItems) {
  Sweep({}, {MakeSpec(1, 2, 1, 33, 47, 64, 64), MakeSpec(2, 4, 2, 70, 90, 64, 64, DType::kBFloat16),
             MakeSpec(1, 8, 2, 1, 900, 128, 128, DType::kFloat16)});
}

TEST_F(CudaLaneFaultsTest, FailuresEndItemsCopiedByTheEngines) {
  cuda::LaneTuning tuning;
  tuning.copy_kernel_bytes_max = 0;
  Sweep(tuning, {MakeSpec(1, 2, 1, 33, 47, 64, 64), MakeSpec(2, 2, 2, 70, 90, 64, 64)});
}

TEST_F(CudaLaneFaultsTest, FailuresEndItemsInParts) {
  cuda::LaneTuning tuning;
  tuning.cut.parts_min = 4;
  Sweep(tuning,
        {MakeSpec(8, 2, 2, 40, 40, 64, 64, DType::kFloat16), MakeSpec(1, 2, 1, 33, 47, 64, 64)});
}

// A lane is created, or the error names the failed call.
TEST_F(CudaLaneFaultsTest, CreatingALaneReportsWhatFailed) {
  int64_t met = 0;
  for (const std::string& function : WrappedCudaCalls()) {
    for (int64_t n = 1; n <= kCallsMost; ++n) {
      SCOPED_TRACE(function + ", call " + std::to_string(n));
      FailCudaCall(function, n, ErrorOf(function));
      const Result<std::unique_ptr<Lane>> lane = harness_->MakeLane({});
      const bool more = CudaFaultWasMet();
      FailCudaCall("", 0, cudaSuccess);
      if (!lane.ok()) {
        EXPECT_NE(lane.status().message().find("cudaError"), std::string::npos)
            << lane.status().ToString();
      }
      if (!more) break;
      ++met;
    }
  }
  EXPECT_GT(met, 5);
  Sweep({}, {MakeSpec(1, 2, 1, 33, 47, 64, 64)});
}

}  // namespace
}  // namespace attend::test
