// SPDX-License-Identifier: Apache-2.0
//
// Small requests that run on the thread that submits them: when they may, when not, and that every
// request ends exactly once.

#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>

#include "server/util/thresholds.h"
#include "tests/server/support/engine_fixture.h"

namespace attend {
namespace {

class CallersRunTest : public EngineTest {
 protected:
  // Records the thread on which a request ends.
  class ThreadNote final : public Responder {
   public:
    explicit ThreadNote(Collector& collector) : collector_(collector) {}
    void Finish(std::unique_ptr<Request> request) override {
      thread = std::this_thread::get_id();
      collector_.Finish(std::move(request));
    }
    std::thread::id thread;  // read only after the request has ended

   private:
    Collector& collector_;
  };

  std::unique_ptr<Request> NewSmall(ThreadNote& note) {
    auto request = NewRequest();
    request->may_end_in_submit = true;
    request->responder = &note;
    return request;
  }
  std::unique_ptr<Request> NewSmall() { return NewSmall(note_); }
  // Submits requests of a single read, to be planned by this thread. Returns their ids.
  std::vector<uint64_t> SubmitTogether(int count) {
    std::vector<uint64_t> ids;
    for (int i = 0; i < count; ++i) {
      auto request = NewSmall();
      request->planner = std::this_thread::get_id();
      ids.push_back(MustSubmit(std::move(request)));
    }
    return ids;
  }
  bool EndedHere(uint64_t id) {
    (void)collector_.WaitFor(id);
    return note_.thread == std::this_thread::get_id();
  }

  ThreadNote note_{collector_};
  ThreadNote other_note_{collector_};  // for requests that end on other threads
};

TEST_F(CallersRunTest, OnAnIdleDeviceARequestEndsBeforeSubmitReturns) {
  Start();
  for (int i = 0; i < 3; ++i) {
    const uint64_t id = MustSubmit(NewSmall());
    ASSERT_TRUE(collector_.Ended(id));
    EXPECT_EQ(note_.thread, std::this_thread::get_id());
    const Request& request = collector_.WaitFor(id);
    ASSERT_TRUE(request.status.ok()) << request.status.ToString();
    const RowsReport report = CheckAllRows(request.attention);
    EXPECT_TRUE(report.ok) << report.detail << " seed " << seed_;
    EXPECT_EQ(request.batch_requests, 1);
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
}

TEST_F(CallersRunTest, RequestsOfOneReadAreOneBatch) {
  options_.worker.queue_requests_max = 100;
  options_.worker.batcher.batch_requests_max = 16;
  Start();
  const std::vector<uint64_t> ids = SubmitTogether(5);
  EXPECT_EQ(devices_[0]->submitted_batches(), 0);
  engine_->PlanNow();
  EXPECT_EQ(devices_[0]->submitted_batches(), 1);
  for (const uint64_t id : ids) {
    ASSERT_TRUE(collector_.Ended(id));
    EXPECT_EQ(collector_.WaitFor(id).batch_requests, 5);
  }
  EXPECT_EQ(note_.thread, std::this_thread::get_id());
  engine_->PlanNow();  // nothing to plan
  EXPECT_EQ(devices_[0]->submitted_batches(), 1);
}

TEST_F(CallersRunTest, ARequestCancelledBeforeItIsPlannedIsNeverQueued) {
  Start();
  const uint64_t id = SubmitTogether(1).front();
  engine_->Cancel(id);
  const Request& gone = collector_.WaitFor(id);
  EXPECT_EQ(gone.status.code(), Code::kCancelled);
  EXPECT_EQ(gone.enqueued, TimePoint());
  engine_->PlanNow();
  const uint64_t runs = HoldLane();
  const uint64_t waits = SubmitTogether(1).front();
  engine_->PlanNow();  // the only lane is busy
  engine_->Cancel(waits);
  EXPECT_NE(collector_.WaitFor(waits).enqueued, TimePoint());
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(runs).status.ok());
}

TEST_F(CallersRunTest, AnotherThreadsRequestIsPlannedAtOnce) {
  Start();
  auto request = NewSmall();
  request->planner = std::thread::id();
  EXPECT_TRUE(EndedHere(MustSubmit(std::move(request))));
}

TEST_F(CallersRunTest, ManyRequestsOfOneReadDoNotOverflowTheQueue) {
  options_.worker.queue_requests_max = 4;
  options_.worker.batcher.batch_requests_max = 16;
  Start();
  // The request that fills the queue plans all of them. All have ended before the next round: the
  // scheduler's thread may have put some on the only lane.
  for (int round = 0; round < 8; ++round) {
    const std::vector<uint64_t> ids = SubmitTogether(4);
    engine_->PlanNow();  // those that came after the scheduler's thread took others
    for (const uint64_t id : ids) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  }
}

TEST_F(CallersRunTest, ARequestThatMayNotEndInSubmitEndsElsewhere) {
  Start();
  auto request = NewSmall();
  request->may_end_in_submit = false;
  EXPECT_FALSE(EndedHere(MustSubmit(std::move(request))));
}

TEST_F(CallersRunTest, ALargeRequestEndsElsewhere) {
  options_.worker.batcher.batch_flops_max = 1;
  Start();
  EXPECT_FALSE(EndedHere(MustSubmit(NewSmall())));
}

TEST_F(CallersRunTest, ARequestThatOutlastsThePollEndsElsewhere) {
  Start();
  devices_[0]->Hold();
  const uint64_t id = MustSubmit(NewSmall());
  devices_[0]->WaitForWaiting(1);
  EXPECT_FALSE(collector_.Ended(id));
  devices_[0]->Release();
  EXPECT_FALSE(EndedHere(id));
  EXPECT_TRUE(collector_.WaitFor(id).status.ok());
}

TEST_F(CallersRunTest, BesideABusyLaneARequestIsStartedButNotAwaited) {
  options_.worker.lanes = 2;
  Start();
  devices_[0]->Hold();
  // Started by this thread, so that no other thread plans when the next request comes.
  MustSubmit(NewSmall(other_note_));
  devices_[0]->WaitForWaiting(1);
  const uint64_t beside = MustSubmit(NewSmall());
  EXPECT_EQ(devices_[0]->submitted_batches(), 2) << "by Submit, not by another thread";
  const uint64_t queued = MustSubmit(NewSmall(other_note_));
  EXPECT_EQ(devices_[0]->submitted_batches(), 2) << "no lane is free";
  devices_[0]->Release();
  EXPECT_FALSE(EndedHere(beside));
  EXPECT_TRUE(collector_.WaitFor(queued).status.ok());
}

TEST_F(CallersRunTest, BusyTimeIsCountedWhileLanesAreBusy) {
  options_.worker.lanes = 2;
  Start();
  EXPECT_EQ(engine_->Devices()[0].busy, Duration::zero());
  devices_[0]->Hold();
  MustSubmit(NewSmall());
  devices_[0]->WaitForWaiting(1);
  const TimePoint began = clock_.Now();
  while (clock_.Now() - began < std::chrono::milliseconds(2)) {
  }
  const Duration held = clock_.Now() - began;
  EXPECT_GE(engine_->Devices()[0].busy, held) << "while it runs too";
  devices_[0]->Release();
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  // A lane becomes free a moment after its last request has ended.
  const TimePoint until = clock_.Now() + std::chrono::seconds(10);
  Duration before, busy = engine_->Devices()[0].busy;
  do {
    before = busy;
    const TimePoint now = clock_.Now();
    while (clock_.Now() == now) {
    }
    busy = engine_->Devices()[0].busy;
  } while (busy != before && clock_.Now() < until);
  EXPECT_GE(busy, held);
  EXPECT_EQ(busy, before) << "no lane is busy";
}

TEST_F(CallersRunTest, ADelayedBatchIsLeftToTheScheduler) {
  options_.worker.batcher.batch_requests_max = 2;
  options_.worker.batcher.batch_delay = std::chrono::hours(1);
  Start();
  const uint64_t first = MustSubmit(NewSmall());
  EXPECT_FALSE(collector_.Ended(first));
  const uint64_t second = MustSubmit(NewSmall(other_note_));
  EXPECT_EQ(collector_.WaitFor(first).batch_requests, 2);
  EXPECT_EQ(collector_.WaitFor(second).batch_requests, 2);
}

TEST_F(CallersRunTest, AFaultEndsTheRequestOnItsCallersThread) {
  Start(2);
  devices_[0]->FailSubmit(1, Internal("planted fault"));
  const uint64_t refused = MustSubmit(NewSmall());
  EXPECT_TRUE(EndedHere(refused));
  EXPECT_EQ(collector_.WaitFor(refused).status.code(), Code::kInternal);
  devices_[0]->FailItem(1, Internal("planted fault"));
  const uint64_t failed = MustSubmit(NewSmall());
  EXPECT_TRUE(EndedHere(failed));
  EXPECT_EQ(collector_.WaitFor(failed).status.message(), "planted fault");
  devices_[0]->LoseDevice();
  const uint64_t lost = MustSubmit(NewSmall());
  EXPECT_EQ(collector_.WaitFor(lost).status.code(), Code::kUnavailable);
  const uint64_t after = MustSubmit(NewSmall());
  EXPECT_EQ(collector_.WaitFor(after).device_name, "cpu1");
}

// Callers, the scheduler's thread and the lanes' threads start batches on one device at the same
// time. Some requests are cancelled, and the engine stops in the middle.
TEST_F(CallersRunTest, RequestsEndOnceUnderManyCallersAndAStop) {
  constexpr int kThreads = 3;
  constexpr int kEach = 200;
  for (int round = 0; round < 10; ++round) {
    options_.worker.lanes = 2;
    options_.worker.queue_requests_max = kThreads * kEach;
    options_.worker.batcher.batch_requests_max = 4;
    std::vector<std::unique_ptr<test::FakeBackend>> backends;
    backends.push_back(std::make_unique<test::FakeBackend>());
    backends.back()->SetCompute([](const Attention&) {});
    StartOn(std::move(backends));
    std::vector<std::vector<std::unique_ptr<Request>>> requests(kThreads);
    std::vector<std::vector<bool>> plans(kThreads);
    const uint64_t first_id = last_id_ + 1;
    for (int n = 0; n < kThreads * kEach; ++n) {
      requests[n % kThreads].push_back(NewRequest(test::MakeSpec(1, 1, 1, 4, 4, 16, 16)));
      requests[n % kThreads].back()->may_end_in_submit = n % 5 != 0;
      plans[n % kThreads].push_back(n % 3 != 0);
    }
    std::atomic<int> accepted{0};
    std::atomic<int> refused{0};
    std::vector<std::thread> callers;
    for (int t = 0; t < kThreads; ++t) {
      callers.emplace_back([&, t] {
        std::mt19937_64 random(seed_ + static_cast<uint64_t>(t));
        for (size_t n = 0; n < requests[t].size(); ++n) {
          std::unique_ptr<Request>& request = requests[t][n];
          if (plans[t][n]) request->planner = std::this_thread::get_id();
          const Status status = engine_->Submit(request);
          (status.ok() ? accepted : refused).fetch_add(1);
          if (random() % 4 == 0) engine_->PlanNow();
          if (random() % 8 == 0) engine_->Cancel(first_id + random() % (kThreads * kEach));
        }
        engine_->PlanNow();
      });
    }
    if (round % 2 == 1) {
      while (accepted + refused < kEach / 2) std::this_thread::yield();
      engine_->Drain();
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_TRUE(engine_->WaitIdle(kNever));
    EXPECT_EQ(accepted + refused, kThreads * kEach);
    engine_.reset();
    devices_.clear();  // destroyed with the engine
    for (uint64_t id = first_id; id < first_id + kThreads * kEach; ++id) {
      if (collector_.Ended(id)) --accepted;
    }
    EXPECT_EQ(accepted, 0) << "every accepted request ends, and no other";
    memory_.clear();
  }
}

}  // namespace
}  // namespace attend
