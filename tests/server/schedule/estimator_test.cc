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
  // A batch of requests of this cost each ran to its end, or was stopped for this reason.
  void Learn(double cost, Duration took, int requests = 1, Code stopped = Code::kOk) {
    std::vector<std::unique_ptr<Request>> batch;
    std::vector<Request*> raw;
    for (int i = 0; i < requests; ++i) {
      batch.push_back(Make(cost));
      raw.push_back(batch.back().get());
      if (stopped != Code::kOk) StopRunning(*raw.back(), stopped);
    }
    estimator_.Learn(raw, stopped == Code::kOk ? BatchEnd::kWhole : BatchEnd::kStopped, took,
                     kStart);
  }

  Estimator estimator_{0};
};

TEST_F(EstimatorTest, KnowsNothingUntilARequestOfThatSizeAndKernelRan) {
  EXPECT_EQ(Expect(1e6), Duration::zero());
  Learn(1e6, milliseconds(10));
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  EXPECT_EQ(Expect(0.9e6), milliseconds(9)) << "by cost";
  const auto other = Make(1e6);
  other->selection.kernel = KernelId::kCpuFlash;
  EXPECT_EQ(estimator_.Expect(*other), Duration::zero());
  other->selection.kernel = {};
  other->backward.emplace();
  EXPECT_EQ(estimator_.Expect(*other), Duration::zero());
}

TEST_F(EstimatorTest, AnUnknownSizeIsEstimatedFromTheNearestOne) {
  Learn(1e6, milliseconds(10));
  EXPECT_EQ(Expect(1e4), std::chrono::microseconds(100)) << "at the rate of a larger one";
  const Duration larger = Expect(1e9);
  EXPECT_GT(larger, milliseconds(2)) << "no less than the smallest one of that size";
  EXPECT_LE(larger, milliseconds(10));
  Learn(1e8, milliseconds(100));
  EXPECT_EQ(Expect(1e7), milliseconds(10));
  EXPECT_GT(Expect(1e12), milliseconds(25));
}

TEST_F(EstimatorTest, BeforeAnyRunTheDevicesRateIsUsed) {
  estimator_ = Estimator(1e9);
  EXPECT_EQ(Expect(1e6), milliseconds(1));
  Learn(1e6, milliseconds(10));
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  EXPECT_EQ(Expect(1e9), seconds(1)) << "no faster than the device";
}

TEST_F(EstimatorTest, ABatchCountsOnceForAllItsRequests) {
  Learn(1e6, milliseconds(40), 4);
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  Learn(1e6, milliseconds(80), 4);
  EXPECT_GT(Expect(1e6), milliseconds(11));
  EXPECT_LT(Expect(1e6), milliseconds(12)) << "an eighth of the way to 20";
}

TEST_F(EstimatorTest, FasterRunsAreLearnedSoonerThanSlowerOnes) {
  Learn(1e6, milliseconds(10));
  Learn(1e6, milliseconds(2));
  EXPECT_EQ(Expect(1e6), milliseconds(8));
  Learn(1e6, seconds(1000));
  EXPECT_EQ(Expect(1e6), milliseconds(11)) << "as if it had taken four times as long";
}

TEST_F(EstimatorTest, ARunStoppedByItsDeadlineRaisesTheEstimateAndACancelledOneDoesNot) {
  Learn(1e6, milliseconds(10));
  Learn(1e6, milliseconds(1), 1, Code::kCancelled);
  Learn(1e6, milliseconds(2), 1, Code::kDeadlineExceeded);
  EXPECT_EQ(Expect(1e6), milliseconds(10)) << "it had hardly begun";
  Learn(1e6, milliseconds(10), 1, Code::kDeadlineExceeded);
  EXPECT_EQ(Expect(1e6), std::chrono::microseconds(11'250));
}

TEST_F(EstimatorTest, ARunThatIgnoredItsStopIsMeasuredWhole) {
  Learn(1e6, milliseconds(10));
  auto request = Make(1e6);
  Request* const raw = request.get();
  StopRunning(*raw, Code::kDeadlineExceeded);  // which a GPU does not see
  estimator_.Learn({&raw, 1}, BatchEnd::kWhole, milliseconds(2), kStart);
  EXPECT_EQ(Expect(1e6), milliseconds(8));
}

class TryTest : public EstimatorTest {
 protected:
  TryTest() { Learn(1e6, seconds(1)); }

  // A request tried `at` ms after the start, with `left` ms until its deadline.
  std::unique_ptr<Request> Tried(int at, int left) {
    auto request = Make(1e6);
    request->tried = true;
    request->deadline = At(at + left);
    return request;
  }
  bool MayTry(int at, int left, bool idle = false) {
    return estimator_.MayTry(*Tried(at, left), idle, At(at));
  }
  static TimePoint At(int ms) { return kStart + milliseconds(ms); }
};

TEST_F(TryTest, TriesOfOneKindAreSpaced) {
  EXPECT_FALSE(MayTry(99, 1)) << "one has just run";
  EXPECT_TRUE(MayTry(100, 1));
  EXPECT_FALSE(MayTry(15'999, 1000)) << "16 times what it may take";
  EXPECT_TRUE(MayTry(16'000, 1000));
  EXPECT_TRUE(MayTry(16'000, 1000)) << "none has begun";
  EXPECT_TRUE(MayTry(1000, 900, true)) << "the device is idle";
  estimator_.Tried(*Tried(16'000, 1000), At(16'000));
  EXPECT_FALSE(MayTry(16'001, 1000));
}

TEST_F(TryTest, ATryWithTwiceTheTimeNeedNotWait) {
  estimator_.Tried(*Tried(1000, 50), At(1000));
  EXPECT_FALSE(MayTry(1010, 99));
  EXPECT_TRUE(MayTry(1010, 100));
  estimator_.Tried(*Tried(1010, 100), At(1010));
  EXPECT_FALSE(MayTry(2609, 10));
  EXPECT_TRUE(MayTry(2610, 10));
}

TEST_F(TryTest, ASuccessfulTryIsLearned) {
  auto request = Tried(1000, 50);
  estimator_.Tried(*request, At(1000));
  Request* const raw = request.get();
  estimator_.Learn({&raw, 1}, BatchEnd::kWhole, milliseconds(10), At(1010));
  EXPECT_EQ(Expect(1e6), milliseconds(10));
  EXPECT_FALSE(MayTry(1020, 100)) << "no try was in vain";
}

TEST_F(TryTest, ATryThatEndedLateCountsAsFailed) {
  auto request = Tried(1000, 50);
  estimator_.Tried(*request, At(1000));
  Request* const raw = request.get();
  estimator_.Learn({&raw, 1}, BatchEnd::kWhole, milliseconds(990), At(1990));
  EXPECT_FALSE(MayTry(4000, 50)) << "16 times 50 ms have passed, but not 16 times 990";
}

TEST_F(EstimatorTest, ZeroAndHugeCostsAreHandled) {
  for (const double cost : {0.0, 1e300}) {
    estimator_ = Estimator(0);
    EXPECT_EQ(Expect(cost), Duration::zero());
    Learn(cost, milliseconds(1));
    EXPECT_GT(Expect(cost), Duration::zero());
    EXPECT_LT(Expect(cost), std::chrono::hours(3)) << "so that sums do not overflow";
  }
  estimator_ = Estimator(0);
  Learn(1e6, Duration::zero());
  EXPECT_EQ(Expect(1e6), Duration::zero()) << "a clock that stood still says nothing";
}

TEST(Outlook, LanesShareTheDeviceWithAReserve) {
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

TEST(Outlook, SparesRunningRequestsThatAreStillInTime) {
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
