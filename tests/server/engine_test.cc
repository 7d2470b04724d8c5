// SPDX-License-Identifier: Apache-2.0
//
// The engine on a device that the test holds in its hand: every request ends exactly once, refusals
// change nothing, faults reach the right requests and planted errors are found.

#include "server/engine.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels/problems.h"
#include "tests/server/fake_backend.h"

namespace attend {
namespace {

using testing::FakeBackend;

// Keeps finished requests; a second end of the same id is a failure.
class Collector final : public Responder {
 public:
  void Finish(std::unique_ptr<Request> request) override {
    std::lock_guard lock(mutex_);
    const uint64_t id = request->id;
    // The answers lie in the test's own memory; blocks must not outlive the engine's pool.
    request->input.Release();
    request->output.Release();
    EXPECT_TRUE(ended_.emplace(id, std::move(request)).second) << id << " ended twice";
    changed_.notify_all();
  }

  const Request& WaitFor(uint64_t id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_.contains(id); });
    return *ended_.at(id);
  }
  bool Ended(uint64_t id) {
    std::lock_guard lock(mutex_);
    return ended_.contains(id);
  }
  size_t count() {
    std::lock_guard lock(mutex_);
    return ended_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::unique_ptr<Request>> ended_;
};

class EngineTest : public ::testing::Test {
 protected:
  EngineTest() {
    options_.worker.lanes = 1;
    options_.worker.queue_requests_max = 4;
    options_.worker.batcher.batch_requests_max = 1;
    options_.memory_budget_bytes = 1 << 20;
  }

  ~EngineTest() override {
    for (FakeBackend* device : devices_) device->Release();
    engine_.reset();
  }

  void Start(int devices = 1) {
    std::vector<std::unique_ptr<Backend>> backends;
    for (int i = 0; i < devices; ++i) {
      auto device = std::make_unique<FakeBackend>(i == 0 ? "cpu" : "cpu" + std::to_string(i));
      devices_.push_back(device.get());
      backends.push_back(std::move(device));
    }
    Result<std::unique_ptr<Engine>> engine =
        Engine::Make(std::move(backends), options_, metrics_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status().ToString();
    engine_ = std::move(*engine);
    engine_->OnCheckFailed([this](const Request& request) {
      std::lock_guard lock(mutex_);
      failed_checks_.push_back(request.id);
    });
  }

  // A request with its own memory, not submitted.
  std::unique_ptr<Request> NewRequest(const test::ProblemSpec& spec) {
    auto request = std::make_unique<Request>();
    request->id = ++last_id_;
    memory_.push_back(
        std::make_unique<test::OwnedAttention>(test::MakeAttention(spec, seed_ + last_id_)));
    request->attention = memory_.back()->attention;
    request->responder = &collector_;
    return request;
  }
  std::unique_ptr<Request> NewRequest() {
    return NewRequest(test::MakeSpec(1, 2, 1, 70, 70, 16, 16));
  }

  // Admits and submits; the contract of Submit is checked wherever a test submits.
  Status Submit(std::unique_ptr<Request> request) {
    Result<Admission> admission =
        engine_->Admit(request->attention.problem, request->kernel, 4096, 1024);
    if (!admission.ok()) return admission.status();
    request->device = admission->device;
    request->selection = admission->selection;
    request->input = std::move(admission->input);
    request->output = std::move(admission->output);
    const int64_t inflight = engine_->inflight();
    const Status status = engine_->Submit(request);
    EXPECT_EQ(status.ok(), request == nullptr) << "taken if and only if OK";
    if (!status.ok()) {
      EXPECT_EQ(engine_->inflight(), inflight);
    }
    return status;
  }
  uint64_t MustSubmit(std::unique_ptr<Request> request) {
    const uint64_t id = request->id;
    const Status status = Submit(std::move(request));
    EXPECT_TRUE(status.ok()) << status.ToString();
    return id;
  }

  // Occupies the only lane of device 0 until it is released.
  uint64_t HoldLane() {
    devices_[0]->Hold();
    const uint64_t id = MustSubmit(NewRequest());
    devices_[0]->WaitForWaiting(1);
    return id;
  }

  std::vector<uint64_t> failed_checks() {
    std::lock_guard lock(mutex_);
    return failed_checks_;
  }

  const uint64_t seed_ = test::FreshSeed();
  EngineOptions options_;
  SteadyClock clock_;
  Metrics metrics_{"test"};
  Collector collector_;
  std::mutex mutex_;
  std::vector<uint64_t> failed_checks_;
  std::vector<FakeBackend*> devices_;
  std::vector<std::unique_ptr<test::OwnedAttention>> memory_;
  std::unique_ptr<Engine> engine_;
  uint64_t last_id_ = 0;
};

TEST_F(EngineTest, AnswersAreRightAndEndOnce) {
  options_.worker.lanes = 3;
  options_.worker.queue_requests_max = 1000;
  options_.worker.batcher.batch_requests_max = 8;
  Start();
  for (int i = 0; i < 100; ++i) MustSubmit(NewRequest(test::RandomSpec(seed_ + i, 2e4)));
  for (uint64_t id = 1; id <= 100; ++id) {
    const Request& request = collector_.WaitFor(id);
    ASSERT_TRUE(request.status.ok()) << request.status.ToString();
    const RowsReport report = CheckAllRows(request.attention);
    EXPECT_TRUE(report.ok) << report.detail << " seed " << seed_;
    EXPECT_EQ(request.device_name, "cpu");
    EXPECT_GE(request.batch_requests, 1);
    EXPECT_LE(request.batch_requests, 8);
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
}

TEST_F(EngineTest, ADeadlineFiresWhileTheLaneIsBusy) {
  Start();
  const uint64_t running = HoldLane();
  auto request = NewRequest();
  request->deadline = clock_.Now() + std::chrono::milliseconds(5);
  const uint64_t queued = MustSubmit(std::move(request));
  const Request& expired = collector_.WaitFor(queued);
  EXPECT_EQ(expired.status.code(), Code::kDeadlineExceeded);
  EXPECT_FALSE(collector_.Ended(running));
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
}

TEST_F(EngineTest, ADeadlineInThePastIsRefused) {
  Start();
  auto request = NewRequest();
  request->deadline = clock_.Now() - std::chrono::milliseconds(1);
  EXPECT_EQ(Submit(std::move(request)).code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest())).status.ok());
}

TEST_F(EngineTest, CancelDropsWhatIsQueuedAndLeavesWhatRuns) {
  Start();
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  engine_->Cancel(queued, 0);
  EXPECT_EQ(collector_.WaitFor(queued).status.code(), Code::kCancelled);
  engine_->Cancel(running, 0);
  engine_->Cancel(12345, 0);
  engine_->Cancel(running, 7);
  EXPECT_FALSE(collector_.Ended(running));
  devices_[0]->Release();
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
  EXPECT_EQ(devices_[0]->submitted_items(), 1);
}

TEST_F(EngineTest, AFullQueueRefusesAndLosesNothing) {
  Start();
  HoldLane();
  for (int i = 0; i < 4; ++i) MustSubmit(NewRequest());
  const Status refused = Submit(NewRequest());
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_GT(engine_->RetryAfterMs(), 0);
  devices_[0]->Release();
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_TRUE(collector_.WaitFor(id).status.ok());
  EXPECT_TRUE(collector_.WaitFor(MustSubmit(NewRequest())).status.ok());
}

TEST_F(EngineTest, MemoryAboveTheBudgetIsRefused) {
  Start();
  const auto request = NewRequest();
  const Result<Admission> refused =
      engine_->Admit(request->attention.problem, "", options_.memory_budget_bytes + 1, 16);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(engine_->host_pool().used_bytes(), 0);
}

TEST_F(EngineTest, HigherPriorityRunsFirst) {
  Start();
  HoldLane();
  auto low = NewRequest();
  low->priority = -1;
  auto high = NewRequest();
  high->priority = 1;
  const uint64_t low_id = MustSubmit(std::move(low));
  const uint64_t high_id = MustSubmit(std::move(high));
  devices_[0]->Release();
  EXPECT_LE(collector_.WaitFor(high_id).started, collector_.WaitFor(low_id).started);
}

TEST_F(EngineTest, DrainFinishesWhatWasAcceptedAndRefusesTheRest) {
  Start();
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  engine_->Drain();
  EXPECT_EQ(Submit(NewRequest()).code(), Code::kUnavailable);
  auto late = NewRequest();
  EXPECT_EQ(engine_->Submit(late).code(), Code::kUnavailable) << "admitted before, sent after";
  EXPECT_FALSE(engine_->WaitIdle(clock_.Now() + std::chrono::milliseconds(3)));
  devices_[0]->Release();
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
  EXPECT_TRUE(collector_.WaitFor(queued).status.ok());
}

TEST_F(EngineTest, StopEndsWhatIsQueued) {
  Start();
  const uint64_t running = HoldLane();
  const uint64_t queued = MustSubmit(NewRequest());
  std::thread release([&] {
    collector_.WaitFor(queued);
    devices_[0]->Release();
  });
  engine_->Stop();
  release.join();
  EXPECT_EQ(collector_.WaitFor(queued).status.code(), Code::kUnavailable);
  EXPECT_TRUE(collector_.WaitFor(running).status.ok());
}

TEST_F(EngineTest, AnyFailedSubmissionFailsItsOwnRequestsOnly) {
  Start();
  for (int n = 1; n <= 4; ++n) {
    devices_[0]->FailSubmit(n, Internal("planted fault"));
    for (int i = 1; i <= 4; ++i) {
      const Request& ended = collector_.WaitFor(MustSubmit(NewRequest()));
      EXPECT_EQ(ended.status.code(), i == n ? Code::kInternal : Code::kOk) << n << " " << i;
    }
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
}

TEST_F(EngineTest, AFailedItemLeavesItsBatchWell) {
  options_.worker.batcher.batch_requests_max = 4;
  Start();
  HoldLane();
  for (int i = 0; i < 4; ++i) MustSubmit(NewRequest());
  devices_[0]->FailItem(3, Internal("planted fault"));
  devices_[0]->Release();
  int failed = 0;
  for (uint64_t id = 1; id <= 5; ++id) failed += !collector_.WaitFor(id).status.ok();
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(devices_[0]->batch_sizes(), (std::vector<int64_t>{1, 4}));
}

TEST_F(EngineTest, ALostDeviceFailsItsOwnAndTheOtherServesOn) {
  Start(/*devices=*/2);
  devices_[0]->Hold();
  devices_[0]->LoseDevice();
  std::vector<uint64_t> on_first;
  auto request = NewRequest();
  request->device = 0;
  on_first.push_back(request->id);
  ASSERT_TRUE(engine_->Submit(request).ok());
  devices_[0]->WaitForWaiting(1);
  request = NewRequest();
  request->device = 0;
  on_first.push_back(request->id);
  ASSERT_TRUE(engine_->Submit(request).ok());
  devices_[0]->Release();
  for (const uint64_t id : on_first) {
    EXPECT_EQ(collector_.WaitFor(id).status.code(), Code::kUnavailable);
  }
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_FALSE(engine_->Devices()[0].healthy);
  EXPECT_TRUE(engine_->Devices()[1].healthy);
  for (int i = 0; i < 3; ++i) {
    const Request& ended = collector_.WaitFor(MustSubmit(NewRequest()));
    EXPECT_TRUE(ended.status.ok());
    EXPECT_EQ(ended.device_name, "cpu1");
  }
}

TEST_F(EngineTest, WithNoHealthyDeviceTheServerSaysUnavailable) {
  Start();
  devices_[0]->LoseDevice();
  EXPECT_EQ(collector_.WaitFor(MustSubmit(NewRequest())).status.code(), Code::kUnavailable);
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_EQ(Submit(NewRequest()).code(), Code::kUnavailable);
}

TEST_F(EngineTest, WorkGoesToTheDeviceWithTheLeastOutstanding) {
  Start(/*devices=*/2);
  devices_[0]->Hold();
  devices_[1]->Hold();
  for (int i = 0; i < 6; ++i) MustSubmit(NewRequest());
  devices_[0]->Release();
  devices_[1]->Release();
  EXPECT_TRUE(engine_->WaitIdle(kNever));
  EXPECT_EQ(devices_[0]->submitted_items(), 3);
  EXPECT_EQ(devices_[1]->submitted_items(), 3);
}

TEST_F(EngineTest, AnUnknownKernelIsNamed) {
  Start();
  auto request = NewRequest();
  request->kernel = "cuda_flash_fp32";
  EXPECT_EQ(Submit(std::move(request)).code(), Code::kUnimplemented);
  request = NewRequest();
  request->kernel = "no_such";
  EXPECT_EQ(Submit(std::move(request)).code(), Code::kInvalidArgument);
}

TEST_F(EngineTest, ADeviceWithoutLanesIsAnErrorAtStart) {
  auto device = std::make_unique<FakeBackend>();
  device->FailMakeLane(ResourceExhausted("planted fault"));
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::move(device));
  EXPECT_FALSE(Engine::Make(std::move(backends), options_, metrics_, clock_).ok());
}

// The faults that a reference check exists for, each on request and by the server's own choice.
struct PlantedFault {
  const char* name;
  void (*plant)(const Attention&);
};

void WrongTile(const Attention& a) {  // rows 64..127 of the last head belong to other queries
  float* o = static_cast<float*>(a.o.data) + (a.problem.heads_q - 1) * a.o.stride_h;
  for (int64_t i = 64; i < 128; ++i) {
    for (int64_t d = 0; d < a.problem.dim_v; ++d) o[i * a.o.stride_l + d] *= 1.01f;
  }
}
void LostRow(const Attention& a) {  // never written: what the poison left
  float* o = static_cast<float*>(a.o.data) + 131 * a.o.stride_l;
  for (int64_t d = 0; d < a.problem.dim_v; ++d) o[d] = std::numeric_limits<float>::quiet_NaN();
}
void OneNan(const Attention& a) {
  static_cast<float*>(a.o.data)[77 * a.o.stride_l + 3] = std::numeric_limits<float>::quiet_NaN();
}

class PlantedFaultTest : public EngineTest,
                         public ::testing::WithParamInterface<std::pair<PlantedFault, bool>> {};

TEST_P(PlantedFaultTest, IsCaught) {
  const auto& [fault, by_server] = GetParam();
  options_.checker.sample = by_server ? 1 : 0;
  // Far less than the whole problem costs, so that a sample has to do.
  options_.checker.work_budget = 64.0 * 512 * 64;
  Start();
  const test::ProblemSpec spec = test::MakeSpec(1, 2, 2, 512, 512, 32, 32);
  auto good = NewRequest(spec);
  good->check = !by_server;
  const Request& checked = collector_.WaitFor(MustSubmit(std::move(good)));
  ASSERT_TRUE(checked.report.has_value());
  EXPECT_TRUE(checked.report->ok) << checked.report->detail;
  EXPECT_LT(checked.report->rows_checked, checked.report->rows_total);
  EXPECT_TRUE(failed_checks().empty());

  devices_[0]->Corrupt(fault.plant);
  auto bad = NewRequest(spec);
  bad->check = !by_server;
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

TEST_F(EngineTest, SamplingIsSeededAndKeepsItsShare) {
  CheckerOptions options;
  options.sample = 0.25;
  options.seed = seed_;
  const Checker checker(options, clock_, [](std::unique_ptr<Request>) {});
  const Checker same(options, clock_, [](std::unique_ptr<Request>) {});
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
