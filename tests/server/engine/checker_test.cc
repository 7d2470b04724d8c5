// SPDX-License-Identifier: Apache-2.0
//
// The reference check in the engine: planted faults are found, whether the client or the server
// asked for the check, and correct answers pass.

#include <future>
#include <limits>
#include <memory>
#include <thread>

#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/engine_fixture.h"

namespace attend {
namespace {

// Typical faults, each checked at the client's request and by the server's own sampling.
struct PlantedFault {
  const char* name;
  void (*plant)(const Attention&);
};

void WrongTile(const Attention& a) {  // rows 64..127 of the last head are scaled
  float* o = static_cast<float*>(a.o.data) + (a.problem.heads_q - 1) * a.o.stride_h;
  for (int64_t i = 64; i < 128; ++i) {
    for (int64_t d = 0; d < a.problem.dim_v; ++d) o[i * a.o.stride_l + d] *= 1.01f;
  }
}
void LostRow(const Attention& a) {  // a row never written: it holds the poison
  float* o = static_cast<float*>(a.o.data) + 131 * a.o.stride_l;
  for (int64_t d = 0; d < a.problem.dim_v; ++d) o[d] = std::numeric_limits<float>::quiet_NaN();
}
void OneNan(const Attention& a) {
  static_cast<float*>(a.o.data)[77 * a.o.stride_l + 3] = std::numeric_limits<float>::quiet_NaN();
}

class PlantedFaultTest : public EngineTest,
                         public ::testing::WithParamInterface<std::pair<PlantedFault, bool>> {};

TEST_P(PlantedFaultTest, IsFound) {
  const auto& [fault, by_server] = GetParam();
  options_.checker.sample = by_server ? 1 : 0;
  const test::ProblemSpec spec = test::MakeSpec(1, 2, 2, 512, 512, 32, 32);
  // 64 of the 1024 rows: only a sample is checked.
  options_.checker.work_budget = 64 * CheckWork(spec.problem);
  options_.checker.sampled_work_budget = options_.checker.work_budget;
  Start();
  auto good = NewRequest(spec);
  if (!by_server) good->check = AnswerCheck::kAsked;
  const Request& checked = collector_.WaitFor(MustSubmit(std::move(good)));
  ASSERT_TRUE(checked.report.has_value());
  EXPECT_TRUE(checked.report->ok) << checked.report->detail;
  EXPECT_LT(checked.report->rows_checked, checked.report->rows_total);
  EXPECT_TRUE(failed_checks().empty());

  devices_[0]->Corrupt(fault.plant);
  auto bad = NewRequest(spec);
  if (!by_server) bad->check = AnswerCheck::kAsked;
  const uint64_t id = MustSubmit(std::move(bad));
  const Request& caught = collector_.WaitFor(id);
  ASSERT_TRUE(caught.report.has_value());
  EXPECT_FALSE(caught.report->ok);
  EXPECT_FALSE(caught.report->detail.empty());
  EXPECT_EQ(failed_checks(), std::vector<uint64_t>{id});
}

INSTANTIATE_TEST_SUITE_P(Faults, PlantedFaultTest,
                         ::testing::Values(std::pair{PlantedFault{"WrongTile", WrongTile}, false},
                                           std::pair{PlantedFault{"LostRow", LostRow}, false},
                                           std::pair{PlantedFault{"OneNan", OneNan}, false},
                                           std::pair{PlantedFault{"WrongTile", WrongTile}, true},
                                           std::pair{PlantedFault{"LostRow", LostRow}, true},
                                           std::pair{PlantedFault{"OneNan", OneNan}, true}),
                         [](const auto& info) {
                           return std::string(info.param.first.name) +
                                  (info.param.second ? "ByServer" : "ByClient");
                         });

// A sampled check counts a running check like a waiting one.
TEST_F(EngineTest, ARunningCheckCountsTowardsTheBacklog) {
  CheckerOptions options;
  options.backlog_max = 1;
  std::promise<void> begun;
  std::promise<void> release;
  Checker checker(options, {1}, clock_, *pool_, [&](std::unique_ptr<Request>) {
    begun.set_value();
    release.get_future().wait();
  });
  EXPECT_TRUE(checker.HasRoom());
  checker.Post(NewRequest(test::MakeSpec(1, 1, 1, 4, 4, 8, 8)));
  begun.get_future().wait();
  EXPECT_FALSE(checker.HasRoom());
  release.set_value();
  while (!checker.HasRoom()) std::this_thread::yield();
}

class Unwanted final : public Responder {
 public:
  void Finish(std::unique_ptr<Request>) override {}
  bool unwanted() const override { return true; }
};

TEST_F(EngineTest, ADeadlineIsWatchedAfterAnEarlierOneWasCancelled) {
  test::ManualClock clock;
  CheckerOptions options;
  options.threads = 1;
  std::promise<void> begun, release;
  Collector ended;
  Checker checker(options, {1}, clock, *pool_, [&](std::unique_ptr<Request> request) {
    if (request->deadline == kNever) {  // the first one, on the only thread
      begun.set_value();
      release.get_future().wait();
    }
    ended.Finish(std::move(request));
  });
  checker.Post(NewRequest());
  begun.get_future().wait();
  Unwanted unwanted;
  auto cancelled = NewRequest();
  cancelled->responder = &unwanted;
  cancelled->deadline = clock.Now() + std::chrono::hours(1);
  const uint64_t cancelled_id = cancelled->id;
  checker.Post(std::move(cancelled));
  EXPECT_EQ(ended.WaitFor(cancelled_id).status.code(), Code::kCancelled);
  auto late = NewRequest();
  late->deadline = clock.Now() + std::chrono::hours(2);
  const uint64_t late_id = late->id;
  checker.Post(std::move(late));
  clock.Advance(std::chrono::hours(2));
  // Hangs if the deadline is not watched.
  EXPECT_EQ(ended.WaitFor(late_id).status.code(), Code::kDeadlineExceeded);
  release.set_value();
}

TEST_F(EngineTest, SamplingIsSeededAndHasItsRate) {
  CheckerOptions options;
  options.sample = 0.25;
  options.seed = seed_;
  const Checker checker(options, {1}, clock_, *pool_, [](std::unique_ptr<Request>) {});
  const Checker same(options, {1}, clock_, *pool_, [](std::unique_ptr<Request>) {});
  int sampled = 0;
  for (uint64_t id = 1; id <= 20000; ++id) {
    sampled += checker.Sampled(id);
    ASSERT_EQ(checker.Sampled(id), same.Sampled(id));
  }
  // Binomial(20000, 1/4): six standard deviations are 367.
  EXPECT_NEAR(sampled, 5000, 367) << "seed " << seed_;
}

}  // namespace
}  // namespace attend
