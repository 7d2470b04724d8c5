// SPDX-License-Identifier: Apache-2.0
//
// An engine on devices that the test controls, and a responder that keeps ended requests.

#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/fake_backend.h"

namespace attend {

// Keeps finished requests; a second end of the same id fails the test.
class Collector final : public Responder {
 public:
  void Finish(std::unique_ptr<Request> request) override {
    std::lock_guard lock(mutex_);
    const uint64_t id = request->id;
    // Answers are in the test's memory; blocks must not outlive the engine's pool.
    request->source = {};
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

  // Not in the destructor: requests may still end in members of derived tests.
  void TearDown() override {
    for (test::FakeBackend* device : devices_) {
      device->Release();
      if (device->CanStage()) device->staging().Release();
    }
    engine_.reset();
  }

  void Start(int devices = 1) {
    std::vector<std::unique_ptr<test::FakeBackend>> backends;
    for (int i = 0; i < devices; ++i) {
      backends.push_back(
          std::make_unique<test::FakeBackend>(i == 0 ? "cpu" : "cpu" + std::to_string(i)));
    }
    StartOn(std::move(backends));
  }
  void StartOn(std::vector<std::unique_ptr<test::FakeBackend>> fakes) {
    std::vector<std::unique_ptr<Backend>> backends;
    for (auto& fake : fakes) {
      devices_.push_back(fake.get());
      backends.push_back(std::move(fake));
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
    request->input_spans = {memory_.back()->input};
    request->output_spans = {memory_.back()->output};
    request->responder = &collector_;
    return request;
  }
  std::unique_ptr<Request> NewRequest() {
    return NewRequest(test::MakeSpec(1, 2, 1, 70, 70, 16, 16));
  }

  // Admits and submits a request, and checks the contract of Submit.
  Status Submit(std::unique_ptr<Request> request) {
    Result<Admission> admission =
        engine_->Admit(request->attention.problem, request->kernel, 4096, 1024, request->tenant);
    if (!admission.ok()) return admission.status();
    request->input = std::move(admission->input);
    request->output = std::move(admission->output);
    request->placement = std::move(admission->placement);
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
  // For parts of an engine that are tested without one.
  test::FakeBackend pool_device_;
  const std::unique_ptr<HostPool> pool_ =
      *HostPool::Make(pool_device_.host_allocator(), int64_t{1} << 20, {1});
  Metrics metrics_{"test"};
  Collector collector_;
  std::mutex mutex_;
  std::vector<uint64_t> failed_checks_;
  std::vector<test::FakeBackend*> devices_;
  std::vector<std::unique_ptr<test::OwnedAttention>> memory_;
  std::unique_ptr<Engine> engine_;
  uint64_t last_id_ = 0;
};

}  // namespace attend
