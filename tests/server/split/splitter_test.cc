// SPDX-License-Identifier: Apache-2.0
//
// The splitter between a test that hands in requests and devices that the test plays: thousands of
// seeded schedules of parts that end well, fail, are refused, cancelled, in any order, also from
// inside of each other's calls.

#include "server/split/splitter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/span_copies.h"
#include "tests/server/support/split_specs.h"

namespace attend {
namespace {

constexpr int64_t kPoolBytes = int64_t{1} << 20;

std::vector<SplitDevice> Gpus(int count) {
  std::vector<SplitDevice> devices;
  for (int i = 0; i < count; ++i) {
    DeviceInfo info;
    info.kind = DeviceKind::kCuda;
    info.name = "cuda:" + std::to_string(i);
    info.units = 1;
    info.workspace_bytes_max = int64_t{1} << 30;
    devices.push_back({i, info});
  }
  return devices;
}

// What schedules came across.
struct Coverage {
  int ok = 0, whole = 0, refused = 0, cancelled = 0, failed = 0, late_refusals = 0, inline_ends = 0;
  int passed_on = 0;
};

class Schedule {
 public:
  Schedule(uint64_t seed, Coverage& coverage)
      : random_(seed),
        coverage_(coverage),
        splitter_(*pool_, metrics_,
                  {[this](size_t count) { return std::exchange(next_part_, next_part_ + count); },
                   [this](std::unique_ptr<Request>& part) { return Push(part); },
                   [this](int device, uint64_t id) { CancelPart(device, id); },
                   [this](std::unique_ptr<Request> whole) { End(std::move(whole)); }}) {
    metrics_.AddDevices({{"cuda:0", 1}, {"cuda:1", 1}, {"cuda:2", 1}, {"cuda:3", 1}});
  }

  void Run() {
    refuse_share_ = Dice(3) ? 0 : 0.4;
    fail_share_ = Dice(3) ? 0 : 0.2;
    inline_share_ = Dice(3) ? 0 : 0.5;
    const int requests = static_cast<int>(1 + random_() % 4);
    for (int n = 0; n < requests; ++n) {
      Submit();
      while (Dice(2) && !held_.empty()) Step();
    }
    while (!held_.empty() && !::testing::Test::HasFailure()) Step();
    EXPECT_EQ(ended_.size(), accepted_.size()) << "every request ends";
    EXPECT_EQ(pool_->used_bytes(), 0);
    for (const uint64_t id : accepted_) EXPECT_FALSE(splitter_.Cancel(id)) << "nothing is kept";
  }

 private:
  struct Held {
    std::unique_ptr<Request> part;
    bool running = false;
  };

  bool Dice(uint64_t sides) { return random_() % sides == 0; }
  bool Chance(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }

  void Submit() {
    const test::ProblemSpec spec = test::SplittableSpec(random_(), 3000);
    auto owned = std::make_unique<test::OwnedAttention>(test::MakeAttention(spec, random_()));
    auto request = std::make_unique<Request>();
    const uint64_t id = request->id = ++last_id_;
    request->attention = owned->attention;
    request->input_spans = {owned->input};
    if (Dice(2)) {
      scattered_.push_back(test::Scatter(*owned));
      request->attention = scattered_.back().attention;
      request->input_spans = scattered_.back().spans;
    }
    request->output_spans = {owned->output};
    request->flops = Flops(request->attention);
    memory_.emplace(id, std::move(owned));
    cancel_while_starting_ = Dice(10) ? id : 0;
    whole_of_push_ = id;
    const int pushed_before = pushed_;
    const int devices = 2 + static_cast<int>(random_() % 3);
    request->placement.shards = PlanSplit(request->attention, devices);
    if (request->placement.shards.empty()) {
      ++coverage_.whole;
      return;
    }
    const std::optional<Status> status = splitter_.Submit(request, Gpus(devices));
    if (!status.has_value()) {
      ++coverage_.whole;
      EXPECT_NE(request, nullptr);
      EXPECT_EQ(pushed_, pushed_before) << "changed nothing";
      EXPECT_TRUE(request->device_flops.empty());
    } else if (status->ok()) {
      EXPECT_EQ(request, nullptr) << "taken if and only if OK";
      accepted_.insert(id);
    } else {
      ++coverage_.refused;
      EXPECT_NE(request, nullptr) << "taken if and only if OK";
      EXPECT_EQ(status->code(), Code::kResourceExhausted);
      EXPECT_EQ(pushed_, pushed_before);
      EXPECT_FALSE(splitter_.Cancel(id));
    }
    ASSERT_EQ(ended_.count(id) > 0 && !accepted_.contains(id), false) << "refused and ended";
  }

  Status Push(std::unique_ptr<Request>& part) {
    if (Chance(refuse_share_)) return ResourceExhausted("planted: the queue is full");
    EXPECT_TRUE(part->part);
    const uint64_t id = part->id;
    EXPECT_TRUE(ids_.insert(id).second) << "each part once";
    whole_of_[id] = whole_of_push_;
    ++pushed_;
    devices_of_[whole_of_push_].insert(part->device);
    held_.push_back({std::move(part), false});
    if (cancel_while_starting_ != 0) splitter_.Cancel(std::exchange(cancel_while_starting_, 0));
    // A device may be done with a part before Submit has pushed the next.
    if (Chance(inline_share_)) {
      const auto found = Find(id);
      if (found != held_.end()) {
        ++coverage_.inline_ends;
        Complete(found);
      }
    }
    return Status();
  }

  std::deque<Held>::iterator Find(uint64_t id) {
    return std::find_if(held_.begin(), held_.end(),
                        [id](const Held& held) { return held.part->id == id; });
  }

  void CancelPart(int device, uint64_t id) {
    const auto found = Find(id);
    if (found == held_.end() || found->running) return;
    EXPECT_EQ(found->part->device, device);
    std::unique_ptr<Request> part = std::move(found->part);
    held_.erase(found);
    part->status = Status(Code::kCancelled, "cancelled by the client while queued");
    Responder* const responder = part->responder;
    responder->Finish(std::move(part));
  }

  void Step() {
    const auto chosen = held_.begin() + static_cast<std::ptrdiff_t>(random_() % held_.size());
    if (Dice(12)) {
      splitter_.Cancel(1 + random_() % last_id_);
    } else if (!chosen->running && Dice(2)) {
      chosen->running = true;
    } else {
      Complete(chosen);
    }
  }

  void Complete(std::deque<Held>::iterator held) {
    std::unique_ptr<Request> part = std::move(held->part);
    held_.erase(held);
    if (Chance(fail_share_)) {
      part->status = Dice(2) ? Unavailable("planted: lost") : Internal("planted: fault");
    } else {
      const WorkItem item = {part->attention, {}, part->input_spans, part->output_spans};
      part->status = test::ComputeInCopies(item, CpuReference);
      EXPECT_TRUE(part->status.ok()) << part->status.ToString();
      part->completed = TimePoint(std::chrono::nanoseconds(++clock_));
      part->kernel_ns = clock_;
    }
    Responder* const responder = part->responder;
    responder->Finish(std::move(part));
  }

  void End(std::unique_ptr<Request> whole) {
    EXPECT_TRUE(ended_.insert(whole->id).second) << whole->id << " ended twice";
    const test::OwnedAttention& owned = *memory_.at(whole->id);
    EXPECT_TRUE(owned.GuardsIntact());
    switch (whole->status.code()) {
      case Code::kOk:
        ++coverage_.ok;
        EXPECT_TRUE(CheckAllRows(whole->attention).ok);
        EXPECT_EQ(whole->kernel_ns, clock_) << "of the part that ended last";
        CheckDevices(*whole);
        break;
      case Code::kCancelled:
        ++coverage_.cancelled;
        break;
      case Code::kResourceExhausted:
        ++coverage_.late_refusals;
        break;
      default:
        ++coverage_.failed;
        EXPECT_NE(whole->status.message().find("planted"), std::string::npos);
    }
    for (const Held& held : held_) {
      EXPECT_NE(whole_of_.at(held.part->id), whole->id) << "a part outlived its whole";
    }
  }

  // What each device computed, as the pushes went.
  void CheckDevices(const Request& whole) {
    double flops = 0;
    std::set<int> devices;
    for (const Request::DeviceFlops& each : whole.device_flops) {
      flops += each.flops;
      EXPECT_TRUE(devices.insert(each.device).second) << "each device once";
    }
    EXPECT_NEAR(flops, whole.flops, 1e-6 * whole.flops);
    EXPECT_EQ(devices, devices_of_.at(whole.id));
    coverage_.passed_on += devices.size() == 1;
  }

  std::mt19937_64 random_;
  Coverage& coverage_;
  test::FakeBackend backend_{"cuda:0", DeviceKind::kCuda};
  Metrics metrics_{"test"};
  const std::unique_ptr<HostPool> pool_ =
      *HostPool::Make(backend_.host_allocator(), kPoolBytes, {1});
  std::map<uint64_t, std::unique_ptr<test::OwnedAttention>> memory_;
  std::vector<test::ScatteredInputs> scattered_;
  std::deque<Held> held_;
  std::map<uint64_t, std::set<int>> devices_of_;  // of the parts that were taken
  uint64_t whole_of_push_ = 0;
  std::map<uint64_t, uint64_t> whole_of_;  // by part
  std::set<uint64_t> accepted_, ended_, ids_;
  uint64_t last_id_ = 0;
  uint64_t cancel_while_starting_ = 0;
  int pushed_ = 0;
  int64_t clock_ = 0;
  uint64_t next_part_ = uint64_t{1} << 63;
  double refuse_share_ = 0, fail_share_ = 0, inline_share_ = 0;
  Splitter splitter_;
};

// ATTEND_TEST_SEED=N runs the schedule that failed with seed N first.
TEST(Splitter, EveryScheduleEndsEachRequestOnce) {
  const uint64_t base = test::FreshSeed();
  const auto schedules = std::max<uint64_t>(100, static_cast<uint64_t>(3000 * test::TestScale()));
  Coverage met;
  for (uint64_t seed = base; seed - base < schedules; ++seed) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
    Schedule(seed, met).Run();
    if (HasFailure()) return;
  }
  // A share of the schedules, as sanitizers run, need not meet every case.
  if (test::TestScale() < 1) return;
  for (const int each : {met.ok, met.whole, met.refused, met.cancelled, met.failed,
                         met.late_refusals, met.inline_ends, met.passed_on}) {
    EXPECT_GT(each, 30) << "seed " << base << ": a case that the schedules hardly met";
  }
}

}  // namespace
}  // namespace attend
