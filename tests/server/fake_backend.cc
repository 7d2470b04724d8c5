// SPDX-License-Identifier: Apache-2.0

#include "tests/server/fake_backend.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/cpu/cpu_reference.h"
#include "kernels/host_mapping.h"

namespace attend::testing {
namespace {

class MappedAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override { return MapHostMemory(bytes); }
  void Free(void* data, int64_t bytes) override { UnmapHostMemory(data, bytes); }
  Status Register(void*, int64_t) override { return Status(); }
  void Unregister(void*, int64_t) override {}
};

}  // namespace

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
    {
      const std::lock_guard lock(mutex_);
      batch_.emplace(std::vector<WorkItem>(items.begin(), items.end()), std::move(done));
    }
    wake_.notify_all();
    return Status();
  }

 private:
  using Batch = std::pair<std::vector<WorkItem>, Done>;

  void Run() {
    for (;;) {
      std::optional<Batch> batch;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || batch_.has_value(); });
        if (!batch_.has_value()) return;
        batch.swap(batch_);
      }
      backend_.PassGate();
      BatchOutcome outcome = backend_.RunItems(batch->first);
      batch->second(std::move(outcome));
    }
  }

  FakeBackend& backend_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<Batch> batch_;
  bool stop_ = false;
  std::thread thread_;
};

FakeBackend::FakeBackend(std::string name, DeviceKind kind) : compute_(CpuReference) {
  info_.kind = kind;
  info_.name = std::move(name);
  info_.description = "a device for tests";
  info_.units = 1;
  info_.memory_bytes = int64_t{1} << 30;
  info_.workspace_bytes_max = int64_t{1} << 30;
}

FakeBackend::~FakeBackend() = default;

HostAllocator& FakeBackend::host_allocator() {
  static MappedAllocator allocator;
  return allocator;
}

Result<std::unique_ptr<Lane>> FakeBackend::MakeLane(const LaneOptions&) {
  {
    const std::lock_guard lock(mutex_);
    if (!make_lane_status_.ok()) return std::exchange(make_lane_status_, Status());
  }
  return std::unique_ptr<Lane>(std::make_unique<FakeLane>(*this));
}

void FakeBackend::SetCompute(Compute compute) {
  const std::lock_guard lock(mutex_);
  compute_ = std::move(compute);
}

void FakeBackend::Corrupt(Compute corrupt) {
  const std::lock_guard lock(mutex_);
  corrupt_ = std::move(corrupt);
}

void FakeBackend::Hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
  passes_ = 0;
}

void FakeBackend::Release() {
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
  }
  changed_.notify_all();
}

void FakeBackend::ReleaseOne() {
  {
    const std::lock_guard lock(mutex_);
    ++passes_;
  }
  changed_.notify_all();
}

void FakeBackend::FailSubmit(int n, Status status) {
  const std::lock_guard lock(mutex_);
  submit_faults_[submissions_ + n] = std::move(status);
}

void FakeBackend::FailItem(int n, Status status) {
  const std::lock_guard lock(mutex_);
  item_faults_[items_run_ + n] = std::move(status);
}

void FakeBackend::LoseDevice() {
  const std::lock_guard lock(mutex_);
  lose_device_ = true;
}

void FakeBackend::FailMakeLane(Status status) {
  const std::lock_guard lock(mutex_);
  make_lane_status_ = std::move(status);
}

int64_t FakeBackend::submitted_batches() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(batch_sizes_.size());
}

int64_t FakeBackend::submitted_items() const {
  const std::lock_guard lock(mutex_);
  return items_accepted_;
}

int64_t FakeBackend::waiting_batches() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

std::vector<int64_t> FakeBackend::batch_sizes() const {
  const std::lock_guard lock(mutex_);
  return batch_sizes_;
}

void FakeBackend::WaitForBatches(int64_t count) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return static_cast<int64_t>(batch_sizes_.size()) >= count; });
}

void FakeBackend::WaitForWaiting(int64_t count) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_ >= count; });
}

Status FakeBackend::Accept(int64_t items) {
  const std::lock_guard lock(mutex_);
  const auto fault = submit_faults_.find(++submissions_);
  if (fault != submit_faults_.end()) return fault->second;
  items_accepted_ += items;
  batch_sizes_.push_back(items);
  changed_.notify_all();
  return Status();
}

void FakeBackend::PassGate() {
  std::unique_lock lock(mutex_);
  ++waiting_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !held_ || passes_ > 0; });
  if (held_) --passes_;
  --waiting_;
}

BatchOutcome FakeBackend::RunItems(const std::vector<WorkItem>& items) {
  const auto begin = std::chrono::steady_clock::now();
  BatchOutcome outcome;
  for (const WorkItem& item : items) {
    Compute compute, corrupt;
    Status status;
    {
      const std::lock_guard lock(mutex_);
      compute = compute_;
      corrupt = corrupt_;
      const auto fault = item_faults_.find(++items_run_);
      if (fault != item_faults_.end()) status = fault->second;
      if (lose_device_) status = Unavailable("device " + info_.name + " was lost");
    }
    if (status.ok()) compute(item.attention);
    if (status.ok() && corrupt) corrupt(item.attention);
    outcome.statuses.push_back(std::move(status));
  }
  const std::lock_guard lock(mutex_);
  outcome.device_lost = std::exchange(lose_device_, false);
  outcome.kernel_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin)
          .count();
  return outcome;
}

}  // namespace attend::testing
