// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/estimator.h"

#include <gtest/gtest.h>

#include <vector>

#include "server/schedule/outlook.h"
#include "tests/server/support/queue_requests.h"

namespace attend::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class EstimatorTest : public testing::Test {
 protected:
  static std::unique_ptr<Request> Make(double cost) { return MakeRequest({.flops = cost}); }
  Duration Expect(double cost) const { return estimator_.Expect(*Make(cost)); }
  // A batch of requests of that cost each ran, or was stopped for that reason.
  void Learn(double cost, Duration took, int requests = 1, Code stopped = Code::kOk) {
    std::vector<std::unique_ptr<Request>> batch;
    std::vector<Request*> raw;
    for (int i = 0; i < requests; ++i) {
      batch.push_back(Make(cost));
      raw.push_back(batch.back().get());
      if (stopped != Code::kOk) StopRunning(*raw.back(), stopped);
    }
    estimator_.Learn(raw, took, kStart);
  }

  Estimator estimator_;
};

TEST_F(EstimatorTest, KnowsNothingUntilOneOfThatSizeAndKernelRan) {
  EXPECT_EQ(Expect(1e6), Duration::zero());
  Learn(1e6, milliseconds(10));
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  EXPECT_EQ(Expect(0.9e6), milliseconds(9)) << "by cost";
  EXPECT_EQ(Expect(1e9), Duration::zero()) << "of another size";
  const auto other = Make(1e6);
  other->selection.kernel = KernelId::kCpuFlash;
  EXPECT_EQ(estimator_.Expect(*other), Duration::zero());
  other->selection.kernel = {};
  other->backward.emplace();
  EXPECT_EQ(estimator_.Expect(*other), Duration::zero());
}

TEST_F(EstimatorTest, ABatchCountsOnceForAllThatAreInIt) {
  Learn(1e6, milliseconds(40), 4);
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  Learn(1e6, milliseconds(80), 4);
  EXPECT_GT(Expect(1e6), milliseconds(11));
  EXPECT_LT(Expect(1e6), milliseconds(12)) << "an eighth of the way to 20";
}

TEST_F(EstimatorTest, WhatIsFasterIsBelievedSooner) {
  Learn(1e6, milliseconds(10));
  Learn(1e6, milliseconds(2));
  EXPECT_EQ(Expect(1e6), milliseconds(8));
  Learn(1e6, seconds(1000));
  EXPECT_EQ(Expect(1e6), milliseconds(11)) << "as if it had taken four times as long";
}

TEST_F(EstimatorTest, WhatADeadlineStoppedTakesLongerWhatAClientStoppedSaysNothing) {
  Learn(1e6, milliseconds(10));
  Learn(1e6, milliseconds(1), 1, Code::kCancelled);
  Learn(1e6, milliseconds(2), 1, Code::kDeadlineExceeded);
  EXPECT_EQ(Expect(1e6), milliseconds(10)) << "it had hardly begun";
  Learn(1e6, milliseconds(10), 1, Code::kDeadlineExceeded);
  EXPECT_EQ(Expect(1e6), std::chrono::microseconds(11'250));
}

TEST_F(EstimatorTest, AHopelessRequestIsTriedFromTimeToTimeAndThenBelieved) {
  Learn(1e6, seconds(1));
  auto request = Make(1e6);
  request->deadline = kStart + milliseconds(510);
  const auto tries = [&](int ms) {
    return estimator_.Try(*request, false, kStart + milliseconds(ms));
  };
  EXPECT_FALSE(tries(99)) << "one has just run";
  request->deadline = kNever;  // it may take its second: 16 pass
  EXPECT_FALSE(tries(15'999));
  EXPECT_TRUE(tries(16'000));
  EXPECT_FALSE(tries(16'001));
  EXPECT_FALSE(estimator_.Try(*request, true, kStart + milliseconds(16'999)));
  EXPECT_TRUE(estimator_.Try(*request, true, kStart + milliseconds(17'000))) << "it is idle";
  request->tried = true;
  Request* const raw = request.get();
  estimator_.Learn({&raw, 1}, milliseconds(10), kStart);
  EXPECT_EQ(Expect(1e6), milliseconds(10));
}

TEST_F(EstimatorTest, NoCostAndAnyCostHaveAPlace) {
  for (const double cost : {0.0, 1e300}) {
    EXPECT_EQ(Expect(cost), Duration::zero());
    Learn(cost, milliseconds(1));
    EXPECT_GT(Expect(cost), Duration::zero());
    EXPECT_LT(Expect(cost), std::chrono::hours(3)) << "so that sums do not overflow";
  }
  Learn(1e6, Duration::zero());
  EXPECT_EQ(Expect(1e6), Duration::zero()) << "a clock that stood still says nothing";
}

TEST(Outlook, LanesShareTheDeviceWithAReserveForWhatIsBetween) {
  const auto after = [](const Outlook& outlook, int ahead, int own) {
    return (outlook.End(milliseconds(ahead), milliseconds(own)) - kStart) / milliseconds(1);
  };
  const Outlook idle({}, true, kStart);
  EXPECT_EQ(after(idle, 0, 8), 8) << "of its own time nothing is held back";
  EXPECT_EQ(after(idle, 8, 8), 18);
  const std::vector<Outlook::Running> running = {{milliseconds(4), kNever},
                                                 {milliseconds(40), kNever}};
  EXPECT_EQ(after(Outlook(running, true, kStart), 0, 8), 8 + (4 + 8) * 5 / 4)
      << "beside a longer one it has half of the time";
  EXPECT_EQ(after(Outlook(running, false, kStart), 0, 0), (4 + 4) * 5 / 4)
      << "nothing starts before a lane is free";
  EXPECT_LT(idle.End(Duration::max() / 4, Duration::max() / 4), kNever);
}

TEST(Outlook, SparesWhatRunsIfItIsStillInTime) {
  const auto spares = [](int deadline, int work, int tenant = 3, int32_t priority = 5) {
    const std::vector<Outlook::Running> running = {
        {milliseconds(8), kStart + milliseconds(deadline), 3, 5}};
    const auto request = MakeRequest({.tenant = tenant, .priority = priority});
    return Outlook(running, true, kStart).Spares(*request, milliseconds(work));
  };
  EXPECT_TRUE(spares(18, 8));
  EXPECT_TRUE(spares(18, 1000)) << "it has half of the time until then, however long that lasts";
  EXPECT_FALSE(spares(17, 8));
  EXPECT_TRUE(spares(17, 7));
  EXPECT_TRUE(spares(7, 8)) << "it is late anyway";
  EXPECT_FALSE(spares(17, 8, 3, 4));
  EXPECT_TRUE(spares(17, 8, 3, 6)) << "of a higher priority";
  EXPECT_TRUE(spares(17, 8, 2)) << "of another tenant";
}

}  // namespace
}  // namespace attend::test
