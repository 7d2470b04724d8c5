// SPDX-License-Identifier: Apache-2.0

#include "server/engine/placement.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/cost.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/fake_backend.h"

namespace attend {
namespace {

class PlacementTest : public ::testing::Test {
 protected:
  test::FakeBackend& Add(const std::string& name, DeviceKind kind) {
    backends_.push_back(std::make_unique<test::FakeBackend>(name, kind));
    devices_.push_back({backends_.back().get(), true, std::numeric_limits<double>::infinity()});
    return *backends_.back();
  }
  test::FakeBackend& AddGathering(const std::string& name) {
    test::FakeBackend& backend = Add(name, DeviceKind::kCuda);
    backend.GatherSpans();
    return backend;
  }

  Result<std::vector<Candidate>> Find(int pinned = kAnyDevice) {
    return FindCandidates(request_.attention.problem, request_.pass(), request_.kernel, pinned,
                          devices_);
  }
  Status Decide(bool sampled = false) {
    const Batcher batcher{BatcherOptions{}};
    Result<std::vector<Candidate>> candidates = Find();
    if (!candidates.ok()) return candidates.status();
    request_.placement.candidates = std::move(*candidates);
    return attend::Decide(batcher, devices_, sampled, request_);
  }
  const Placement& placement() const { return request_.placement; }
  std::vector<int> chosen() const {
    std::vector<int> devices;
    for (const Candidate& each : placement().candidates) devices.push_back(each.device);
    return devices;
  }

  PlacementTest() {
    request_.attention = owned_.attention;
    request_.input_spans = {owned_.input};
    request_.output_spans = {owned_.output};
  }

  test::OwnedAttention owned_ =
      test::MakeAttention(test::MakeSpec(4, 4, 4, 64, 64, 16, 16), test::FreshSeed());
  Request request_;
  std::vector<std::unique_ptr<test::FakeBackend>> backends_;
  std::vector<PlaceableDevice> devices_;
};

TEST_F(PlacementTest, EveryCandidateHasItsCosts) {
  Add("cuda:0", DeviceKind::kCuda);
  Add("cpu", DeviceKind::kCpu);
  ASSERT_TRUE(Decide().ok());
  EXPECT_EQ(chosen(), (std::vector<int>{0, 1}));
  EXPECT_EQ(request_.flops, Flops(request_.attention));
  for (const Candidate& each : placement().candidates) {
    EXPECT_EQ(each.kernel_cost, Cost(request_.attention, each.selection.kernel));
    EXPECT_GT(each.cost, 0);
    EXPECT_FALSE(each.in_parts);
  }
}

TEST_F(PlacementTest, LostDevicesAreNotCandidates) {
  Add("cuda:0", DeviceKind::kCuda);
  Add("cuda:1", DeviceKind::kCuda);
  devices_[0].healthy = false;
  ASSERT_TRUE(Decide().ok());
  EXPECT_EQ(chosen(), std::vector<int>{1});
  EXPECT_EQ(Find(0).status().code(), Code::kUnavailable) << "pinned to the lost one";
  devices_[1].healthy = false;
  EXPECT_EQ(Find().status().message(), "no device is healthy");
}

TEST_F(PlacementTest, DevicesForWhichItIsTooExpensiveAreLeftOut) {
  Add("cuda:0", DeviceKind::kCuda);
  Add("cuda:1", DeviceKind::kCuda);
  devices_[0].cost_max = 1;
  ASSERT_TRUE(Decide().ok());
  EXPECT_EQ(chosen(), std::vector<int>{1});
  devices_[1].cost_max = 1;
  const Status refused = Decide();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("may cost at most 1 (max-request-gflop)"), std::string::npos)
      << refused.ToString();
}

TEST_F(PlacementTest, GathersOnlyIfNothingElseReadsTheBlock) {
  AddGathering("cuda:0");
  test::FakeBackend& other = AddGathering("cuda:1");
  ASSERT_TRUE(Decide().ok());
  EXPECT_TRUE(placement().may_gather);
  ASSERT_TRUE(Decide(/*sampled=*/true).ok());
  EXPECT_EQ(request_.check, AnswerCheck::kSampled);
  EXPECT_FALSE(placement().may_gather) << "the checker reads the block";
  request_.check = AnswerCheck::kAsked;
  ASSERT_TRUE(Decide().ok());
  EXPECT_FALSE(placement().may_gather);
  request_.check = AnswerCheck::kNone;
  other.StopGathering();
  ASSERT_TRUE(Decide().ok());
  EXPECT_FALSE(placement().may_gather) << "one of the two cannot";
}

}  // namespace
}  // namespace attend
