// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/fake_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "kernels/cpu/append_keys.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "kernels/util/host_mapping.h"
#include "tests/server/support/span_copies.h"

namespace attend::test {

class FakeBackend::FakeAllocator final : public HostAllocator {
 public:
  explicit FakeAllocator(FakeBackend& backend) : backend_(backend) {}
  ~FakeAllocator() override {
    EXPECT_TRUE(allocated_.empty()) << allocated_.size() << " pieces were kept";
    EXPECT_TRUE(registered_.empty()) << registered_.size() << " mappings were kept";
  }

  Result<void*> Allocate(int64_t bytes) override {
    ATTEND_RETURN_IF_ERROR(backend_.AcceptAllocation());
    Result<void*> data = MapHostMemory(bytes);
    const std::lock_guard lock(mutex_);
    if (data.ok()) allocated_.emplace(*data, bytes);
    return data;
  }
  void Free(void* data, int64_t bytes) override {
    {
      const std::lock_guard lock(mutex_);
      EXPECT_EQ(allocated_.erase({data, bytes}), 1u) << "twice, or of another size";
    }
    UnmapHostMemory(data, bytes);
  }
  Status Register(void* data, int64_t bytes) override {
    ATTEND_RETURN_IF_ERROR(backend_.AcceptRegistration());
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(registered_.emplace(data, bytes).second) << "twice";
    return Status();
  }
  void Unregister(void* data, int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(registered_.erase({data, bytes}), 1u) << "twice, or of another size";
  }

 private:
  FakeBackend& backend_;
  std::mutex mutex_;
  std::set<std::pair<void*, int64_t>> allocated_;
  std::set<std::pair<void*, int64_t>> registered_;
};

class FakeBackend::FakeLane final : public Lane {
 public:
  explicit FakeLane(FakeBackend& backend) : backend_(backend), thread_([this] { Run(); }) {}

  ~FakeLane() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  Status Submit(std::span<const WorkItem> items, Done done) override {
    ATTEND_RETURN_IF_ERROR(backend_.Accept(static_cast<int64_t>(items.size())));
    HandOver({std::vector<WorkItem>(items.begin(), items.end()), std::move(done)});
    return Status();
  }

  Status SubmitPolled(std::span<const WorkItem> items, Done done) override {
    ATTEND_RETURN_IF_ERROR(backend_.Accept(static_cast<int64_t>(items.size())));
    const std::lock_guard lock(mutex_);
    polled_.emplace(std::vector<WorkItem>(items.begin(), items.end()), std::move(done));
    submitter_ = std::this_thread::get_id();
    return Status();
  }

  // A batch at a closed gate outlasts any poll.
  void Poll(std::chrono::nanoseconds at_most) override {
    EXPECT_GT(at_most.count(), 0);
    std::optional<Batch> batch;
    {
      const std::lock_guard lock(mutex_);
      EXPECT_TRUE(polled_.has_value()) << "polled by somebody who submitted nothing";
      EXPECT_EQ(submitter_, std::this_thread::get_id());
      batch.swap(polled_);
    }
    if (!batch.has_value()) return;
    if (backend_.GateIsClosed()) return HandOver(std::move(*batch));
    batch->second(backend_.RunItems(batch->first));
  }

 private:
  using Batch = std::pair<std::vector<WorkItem>, Done>;

  void HandOver(Batch batch) {
    {
      const std::lock_guard lock(mutex_);
      batch_ = std::move(batch);
    }
    wake_.notify_all();
  }

  void Run() {
    for (;;) {
      std::optional<Batch> batch;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || batch_.has_value(); });
        if (!batch_.has_value()) return;
        batch.swap(batch_);
      }
      backend_.Await(batch->first);
      backend_.PassGate(batch->first);
      BatchOutcome outcome = backend_.RunItems(batch->first);
      batch->second(std::move(outcome));
    }
  }

  FakeBackend& backend_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<Batch> batch_;
  std::optional<Batch> polled_;
  std::thread::id submitter_;
  bool stop_ = false;
  std::thread thread_;
};

FakeBackend::FakeBackend(std::string name, DeviceKind kind)
    : allocator_(std::make_unique<FakeAllocator>(*this)), compute_(CpuReference) {
  info_.kind = kind;
  info_.name = std::move(name);
  info_.description = "a device for tests";
  info_.units = 1;
  info_.memory_bytes = int64_t{1} << 30;
  info_.workspace_bytes_max = int64_t{1} << 30;
}

FakeBackend::~FakeBackend() { EXPECT_EQ(imported(), 0) << "imports were kept"; }

Status FakeBackend::LostStatus() const { return Unavailable("device " + info_.name + " was lost"); }

HostAllocator& FakeBackend::host_allocator() { return *allocator_; }

Result<std::unique_ptr<Lane>> FakeBackend::MakeLane(const LaneOptions&) {
  {
    const std::lock_guard lock(mutex_);
    ATTEND_RETURN_IF_ERROR(lanes_.Next());
  }
  return std::unique_ptr<Lane>(std::make_unique<FakeLane>(*this));
}

Result<std::unique_ptr<DeviceArena>> FakeBackend::MakeArena(int64_t bytes) {
  auto arena = std::make_unique<TestArena>(bytes, arenas_on_host_);
  arena_ = arena.get();
  return std::unique_ptr<DeviceArena>(std::move(arena));
}

Result<std::unique_ptr<Staging>> FakeBackend::MakeStaging(const HostSpan& host,
                                                          std::shared_ptr<void> owner) {
  return stream_->MakeStaging(host, std::move(owner));
}

Status FakeBackend::Accept(int64_t items) {
  const std::lock_guard lock(mutex_);
  ATTEND_RETURN_IF_ERROR(submits_.Next());
  if (lost_) return LostStatus();
  items_accepted_ += items;
  batch_sizes_.push_back(items);
  changed_.notify_all();
  return Status();
}

Status FakeBackend::AcceptAllocation() {
  const std::lock_guard lock(mutex_);
  return allocations_.Next();
}

bool FakeBackend::GateIsClosed() const {
  const std::lock_guard lock(mutex_);
  return held_;
}

Status FakeBackend::AcceptRegistration() {
  const std::lock_guard lock(mutex_);
  return registrations_.Next();
}

void FakeBackend::PassGate(const std::vector<WorkItem>& items) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  changed_.notify_all();
  const auto open = [this] { return !held_ || passes_ > 0; };
  const auto stopped = [&] {
    return honours_stops_ && std::all_of(items.begin(), items.end(),
                                         [](const WorkItem& item) { return Stopped(item.stop); });
  };
  // A stop flag is not signalled, so it is polled.
  while (!open() && !stopped()) {
    changed_.wait_for(lock, std::chrono::milliseconds(honours_stops_ ? 1 : 1000), open);
  }
  if (held_ && passes_ > 0) --passes_;
  --waiting_;
}

BatchOutcome FakeBackend::RunItems(const std::vector<WorkItem>& items) {
  const auto begin = std::chrono::steady_clock::now();
  BatchOutcome outcome;
  Status whole;
  {
    const std::lock_guard lock(mutex_);
    whole = batches_.Next();
    const Status found = losses_.Next();
    if (!found.ok() || lost_) whole = found.ok() ? LostStatus() : found;
    lost_ |= !found.ok();
    outcome.device_lost = lost_;
    for (const WorkItem& item : items) {
      if (cut_ && cut_(item.attention.problem)) outcome.cut_parts += cut_parts_;
    }
  }
  for (const WorkItem& item : items) {
    Compute compute, corrupt;
    Status status;
    bool moves_spans = false;
    {
      const std::lock_guard lock(mutex_);
      moves_spans = moves_spans_;
      EXPECT_TRUE(item.gathered.empty() || gathers_);
      if (!item.gathered.empty()) ++gathered_items_;
      compute = compute_;
      corrupt = corrupt_;
      status = items_.Next();
      if (!whole.ok()) status = whole;
      if (honours_stops_ && Stopped(item.stop)) {
        status = Status(Code::kCancelled, "the item was stopped");
      }
    }
    for (const DeviceEvent* event : item.after) {
      if (status.ok() && FakeStream::Knows(event)) status = FakeStream::WaitFor(event);
    }
    if (status.ok() && moves_spans) {
      status = ComputeInCopies(item, compute);
    } else if (status.ok() && item.gradients) {
      CpuReferenceGradients(item.attention, *item.gradients, item.stop);
    } else if (status.ok()) {
      if (item.append.rows > 0) AppendKeys(item.attention, item.append);
      compute(item.attention);
    }
    if (status.ok() && corrupt) corrupt(item.attention);
    outcome.statuses.push_back(std::move(status));
  }
  outcome.kernel_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin)
          .count();
  outcome.span_ns = outcome.kernel_ns;
  return outcome;
}

}  // namespace attend::test
