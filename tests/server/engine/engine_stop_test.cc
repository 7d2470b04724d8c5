// SPDX-License-Identifier: Apache-2.0
//
// Running requests and checks end when they are no longer wanted: on cancellation, at a deadline,
// or when the server aborts. Nothing is timed here: a request that does not end hangs the test.

#include <pthread.h>

#include <atomic>
#include <memory>
#include <new>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/contract/limits.h"
#include "kernels/reference/cpu_reference.h"
#include "server/schedule/check_queue.h"
#include "tests/server/support/engine_fixture.h"

namespace attend {
namespace {

using std::chrono::milliseconds;

class EngineStopTest : public EngineTest {
 protected:
  void StartStopping() {
    Start();
    devices_[0]->HonourStops();
  }
  // A check that takes minutes: one row, all of whose keys are the same one (stride 0).
  std::unique_ptr<Request> NewEndlessCheck() {
    auto request = NewRequest(test::MakeSpec(1, 1, 1, 1, 1, 256, 256));
    request->attention.problem.len_k = kLengthMax;
    request->attention.k.stride_l = request->attention.v.stride_l = 0;
    request->check = AnswerCheck::kAsked;
    return request;
  }
  // The device computes in no time; checks take forever.
  void StartEndlessChecks() {
    StartStopping();
    devices_[0]->SetCompute([](const Attention&) {});
  }
  void WaitForRunning(const std::string& what) {
    for (;;) {
      for (const BusyRequest& each : engine_->Running()) {
        if (each.doing == what) return;
      }
      std::this_thread::yield();
    }
  }
  // Repeats the cancellation: between its lane and the checker a request is not found.
  void CancelUntilEnded(uint64_t id) {
    while (!collector_.Ended(id)) {
      engine_->Cancel(id);
      std::this_thread::yield();
    }
    EXPECT_EQ(EndOf(id), Code::kCancelled);
  }
  // Submits a request with the shortest deadline that is still accepted.
  template <class Make>
  uint64_t SubmitDue(const Make& make, milliseconds left = milliseconds(4)) {
    for (;; left *= 2) {
      std::unique_ptr<Request> request = make();
      const uint64_t id = request->id;
      request->deadline = clock_.Now() + left;
      if (Submit(std::move(request)).ok()) return id;
    }
  }
  Code EndOf(uint64_t id) { return collector_.WaitFor(id).status.code(); }
};

TEST_F(EngineStopTest, ACancelledRequestStopsRunning) {
  StartStopping();
  const uint64_t id = HoldLane();
  ASSERT_EQ(engine_->Running().size(), 1u);
  EXPECT_EQ(engine_->Running()[0].doing, "cpu_flash on cpu");
  EXPECT_EQ(engine_->Running()[0].id, id);
  engine_->Cancel(id);
  EXPECT_EQ(EndOf(id), Code::kCancelled);
}

// Started by the scheduler's thread, or by the caller's, which then has to wake the scheduler for
// the deadline.
class DeadlineTest : public EngineStopTest, public ::testing::WithParamInterface<bool> {};

TEST_P(DeadlineTest, StopsARunningRequest) {
  StartStopping();
  devices_[0]->Hold();
  for (int n = 0; n < 3; ++n) {
    const auto make = [this] {
      auto request = NewRequest();
      request->may_end_in_submit = GetParam();
      return request;
    };
    // On a busy machine the request may be refused as too late before it runs.
    Code end = Code::kResourceExhausted;
    for (auto left = milliseconds(4); end == Code::kResourceExhausted; left *= 2) {
      ASSERT_LT(left, std::chrono::seconds(60));
      end = EndOf(SubmitDue(make, left));
    }
    EXPECT_EQ(end, Code::kDeadlineExceeded);
  }
}

INSTANTIATE_TEST_SUITE_P(Starters, DeadlineTest, ::testing::Bool());

TEST_F(EngineStopTest, CancellingOneRequestDoesNotStopItsBatch) {
  options_.worker.batcher.batch_requests_max = 8;
  StartStopping();
  HoldLane();
  const uint64_t unwanted = MustSubmit(NewRequest());
  const uint64_t wanted = MustSubmit(NewRequest());
  devices_[0]->ReleaseOne();
  devices_[0]->WaitForBatches(2);
  devices_[0]->WaitForWaiting(1);
  engine_->Cancel(unwanted);
  EXPECT_FALSE(collector_.Ended(unwanted)) << "its batch has not ended";
  devices_[0]->Release();
  EXPECT_EQ(EndOf(unwanted), Code::kCancelled);
  const Request& answered = collector_.WaitFor(wanted);
  ASSERT_TRUE(answered.status.ok());
  EXPECT_TRUE(CheckAllRows(answered.attention).ok) << "seed " << seed_;
}

TEST_F(EngineStopTest, ADeviceThatCannotStopFinishesTheRequest) {
  Start();
  const uint64_t id = HoldLane();
  engine_->Cancel(id);
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(id).status.ok());
}

TEST_F(EngineStopTest, AbortEndsQueuedRunningAndCheckedRequests) {
  StartEndlessChecks();
  const uint64_t checked = MustSubmit(NewEndlessCheck());
  WaitForRunning("reference check");
  const uint64_t waiting = MustSubmit(NewEndlessCheck());
  auto sampled = NewEndlessCheck();
  sampled->check = AnswerCheck::kSampled;  // as if the server had chosen it
  const uint64_t sampled_id = MustSubmit(std::move(sampled));
  collector_.WaitFor(MustSubmit(NewRequest()));  // the checks above have left their lane
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  engine_->Drain();
  engine_->Abort();
  for (const uint64_t id : {checked, waiting, running, queued}) {
    EXPECT_EQ(EndOf(id), Code::kUnavailable) << id;
  }
  EXPECT_TRUE(collector_.WaitFor(sampled_id).status.ok()) << "its client asked for no check";
  EXPECT_TRUE(engine_->WaitIdle(kNever));
}

// A request that ends during the stop gives its place back to the checker.
TEST_F(EngineStopTest, AStopWaitsForARunningCheck) {
  StartEndlessChecks();
  const uint64_t checked = MustSubmit(NewEndlessCheck());
  WaitForRunning("reference check");
  std::thread stopping([this] { engine_->Stop(); });
  while (!engine_->draining()) std::this_thread::yield();
  engine_->Cancel(checked);
  EXPECT_EQ(EndOf(checked), Code::kCancelled);
  stopping.join();
  EXPECT_EQ(engine_->inflight(), 0);
}

TEST_F(EngineStopTest, ACheckEndsAtACancellationOrDeadline) {
  StartEndlessChecks();
  const uint64_t first = MustSubmit(NewEndlessCheck());
  WaitForRunning("reference check");
  const uint64_t second = MustSubmit(NewEndlessCheck());
  const auto make = [this] { return NewEndlessCheck(); };
  EXPECT_EQ(EndOf(SubmitDue(make)), Code::kDeadlineExceeded) << "while another is being checked";
  CancelUntilEnded(second);
  engine_->Cancel(first);
  EXPECT_EQ(EndOf(first), Code::kCancelled);
  const uint64_t last = SubmitDue(make);
  EXPECT_EQ(EndOf(last), Code::kDeadlineExceeded) << "while it is being checked";
  EXPECT_FALSE(collector_.WaitFor(last).report.has_value());
}

TEST_F(EngineStopTest, ChecksBeyondTheLimitAreRefusedBeforeComputing) {
  options_.checker.places_max = 2;
  StartEndlessChecks();
  const uint64_t first = MustSubmit(NewEndlessCheck());
  const uint64_t second = MustSubmit(NewEndlessCheck());
  const Status refused = Submit(NewEndlessCheck());
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("the limit"), std::string::npos) << refused.ToString();
  EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest())).status.ok()) << "without a check";
  CancelUntilEnded(second);
  CancelUntilEnded(first);
  while (engine_->inflight() > 0) std::this_thread::yield();
  CancelUntilEnded(MustSubmit(NewEndlessCheck()));
}

TEST_F(EngineStopTest, EveryTenantsAnswersAreChecked) {
  Result<Tenants> tenants = Tenants::Parse({"a=1", "b=2"});
  ASSERT_TRUE(tenants.ok());
  options_.tenants = std::move(*tenants);
  Start();
  for (int tenant = 0; tenant < 3; ++tenant) {
    auto request = NewRequest();
    request->check = AnswerCheck::kAsked;
    request->tenant = tenant;
    const Request& checked = collector_.WaitFor(MustSubmit(std::move(request)));
    ASSERT_TRUE(checked.report.has_value());
    EXPECT_TRUE(checked.report->ok) << checked.report->detail;
  }
}

TEST_F(EngineStopTest, ARequestThatIsTooExpensiveForItsKernelIsRefused) {
  options_.request_cost_max = 1e9;
  Start();
  const auto refusal = [&](const char* kernel) {
    auto request = NewRequest(test::MakeSpec(1, 1, 1, 2048, 2048, 8, 8));
    request->kernel = kernel;
    return Submit(std::move(request));
  };
  EXPECT_TRUE(refusal("").ok());
  const Status refused = refusal("cpu_reference");
  auto early = NewRequest(test::MakeSpec(1, 1, 1, 2048, 2048, 8, 8));
  EXPECT_TRUE(engine_->Place(*early).ok());
  early->kernel = "cpu_reference";
  early->placement = {};
  EXPECT_EQ(engine_->Place(*early).message(), refused.message());
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("GFLOP with cpu_reference on cpu, may cost at most 1 "),
            std::string::npos)
      << refused.ToString();
  collector_.WaitFor(1);
}

// Throws std::bad_alloc once, for the next check.
class StarvingClock final : public Clock {
 public:
  void Starve() { starving_ = true; }
  TimePoint Now() const override {
    char thread[16] = "";
    pthread_getname_np(pthread_self(), thread, sizeof(thread));
    if (std::string_view(thread) == "attend-check" && starving_.exchange(false)) {
      throw std::bad_alloc();
    }
    return std::chrono::steady_clock::now();
  }

 private:
  mutable std::atomic<bool> starving_{false};
};

TEST_F(EngineStopTest, WithoutMemoryACheckFailsInsteadOfTheProcess) {
  StarvingClock clock;
  Collector ended;
  Checker checker(CheckerOptions(), {1}, clock, *pool_,
                  [&](std::unique_ptr<Request> request) { ended.Finish(std::move(request)); });
  for (const bool sampled : {false, true}) {
    clock.Starve();
    auto request = NewRequest();
    const uint64_t id = request->id;
    request->check = sampled ? AnswerCheck::kSampled : AnswerCheck::kAsked;
    checker.Post(std::move(request));
    const Request& unchecked = ended.WaitFor(id);
    EXPECT_FALSE(unchecked.report.has_value());
    // A check that the client did not ask for must not withhold the answer.
    EXPECT_EQ(unchecked.status.code(), sampled ? Code::kOk : Code::kResourceExhausted);
  }
  auto request = NewRequest();
  const uint64_t id = request->id;
  CpuReference(request->attention);
  checker.Post(std::move(request));
  ASSERT_TRUE(ended.WaitFor(id).report.has_value()) << "the thread is there";
  EXPECT_TRUE(ended.WaitFor(id).report->ok);
}

}  // namespace
}  // namespace attend
