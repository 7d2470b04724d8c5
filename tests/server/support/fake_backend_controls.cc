// SPDX-License-Identifier: Apache-2.0
//
// The controls of a FakeBackend, and its counters.

#include <gtest/gtest.h>

#include <utility>

#include "tests/server/support/await.h"
#include "tests/server/support/fake_backend.h"

namespace attend::test {

void FakeBackend::SetCompute(Compute compute) {
  const std::lock_guard lock(mutex_);
  compute_ = std::move(compute);
}

void FakeBackend::MoveSpans() {
  const std::lock_guard lock(mutex_);
  moves_spans_ = true;
}

void FakeBackend::GatherSpans() {
  MoveSpans();
  gathers_ = true;
}

int64_t FakeBackend::gathered_items() const {
  const std::lock_guard lock(mutex_);
  return gathered_items_;
}

void FakeBackend::CutItems(std::function<bool(const Problem&)> cut, int64_t parts) {
  const std::lock_guard lock(mutex_);
  cut_ = std::move(cut);
  cut_parts_ = parts;
}

bool FakeBackend::RunsInParts(const Attention& attention, const Selection&) const {
  const std::lock_guard lock(mutex_);
  return cut_ && cut_(attention.problem);
}

void FakeBackend::SetMemoryUse(const DeviceMemoryUse& use) {
  const std::lock_guard lock(mutex_);
  memory_use_ = use;
}

DeviceMemoryUse FakeBackend::memory_use() const {
  const std::lock_guard lock(mutex_);
  return memory_use_;
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
  submits_.FailNth(n, std::move(status));
}

void FakeBackend::FailItem(int n, Status status) {
  const std::lock_guard lock(mutex_);
  items_.FailNth(n, std::move(status));
}

void FakeBackend::FailBatch(int n, Status status) {
  const std::lock_guard lock(mutex_);
  batches_.FailNth(n, std::move(status));
}

void FakeBackend::FailAllocate(int n, Status status) {
  const std::lock_guard lock(mutex_);
  allocations_.FailNth(n, std::move(status));
}

void FakeBackend::FailRegister(int n, Status status) {
  const std::lock_guard lock(mutex_);
  registrations_.FailNth(n, std::move(status));
}

void FakeBackend::FailMakeLane(int n, Status status) {
  const std::lock_guard lock(mutex_);
  lanes_.FailNth(n, std::move(status));
}

void FakeBackend::FailImportMemory(int n, Status status) {
  const std::lock_guard lock(mutex_);
  memory_imports_.FailNth(n, std::move(status));
}

void FakeBackend::FailImportEvent(int n, Status status) {
  const std::lock_guard lock(mutex_);
  event_imports_.FailNth(n, std::move(status));
}

void FakeBackend::LoseDevice(int n) { LoseDevice(n, LostStatus()); }

void FakeBackend::LoseDevice(int n, Status found) {
  const std::lock_guard lock(mutex_);
  losses_.FailNth(n, std::move(found));
}

void FakeBackend::ForgetFaults() {
  const std::lock_guard lock(mutex_);
  for (CallFaults* each : {&submits_, &items_, &batches_, &allocations_, &registrations_, &lanes_,
                           &memory_imports_, &event_imports_, &losses_}) {
    each->Forget();
  }
}

FakeBackend::Calls FakeBackend::calls() const {
  const std::lock_guard lock(mutex_);
  return {submits_.calls(),       items_.calls(),          batches_.calls(),
          registrations_.calls(), memory_imports_.calls(), event_imports_.calls()};
}

int64_t FakeBackend::submitted_batches() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(batch_sizes_.size());
}

int64_t FakeBackend::submitted_items() const {
  const std::lock_guard lock(mutex_);
  return items_accepted_;
}

std::vector<int64_t> FakeBackend::batch_sizes() const {
  const std::lock_guard lock(mutex_);
  return batch_sizes_;
}

void FakeBackend::WaitForBatches(int64_t count) const {
  std::unique_lock lock(mutex_);
  const bool are = changed_.wait_for(
      lock, kWaitMost, [&] { return static_cast<int64_t>(batch_sizes_.size()) >= count; });
  EXPECT_TRUE(are) << batch_sizes_.size() << " batches have come, not " << count;
}

void FakeBackend::WaitForWaiting(int64_t count) const {
  std::unique_lock lock(mutex_);
  const bool are = changed_.wait_for(lock, kWaitMost, [&] { return waiting_ >= count; });
  EXPECT_TRUE(are) << waiting_ << " batches wait, not " << count;
}

}  // namespace attend::test
