// SPDX-License-Identifier: Apache-2.0
//
// Imports of a FakeBackend: memory and events of other processes, which here belong to the test.

#include <gtest/gtest.h>

#include <mutex>
#include <utility>

#include "tests/server/support/fake_backend.h"

namespace attend::test {

class FakeBackend::FakeEvent final : public DeviceEvent {
 public:
  FakeEvent(FakeBackend& backend, std::string handle)
      : backend_(backend), handle_(std::move(handle)) {}
  ~FakeEvent() override {
    const std::lock_guard lock(backend_.mutex_);
    --backend_.imported_events_;
  }
  const std::string& handle() const { return handle_; }

 private:
  FakeBackend& backend_;
  const std::string handle_;
};

void FakeBackend::Lend(const std::string& handle, const ImportedMemory& memory) {
  const std::lock_guard lock(mutex_);
  lent_[handle] = memory;
}

void FakeBackend::LendEvent(const std::string& handle) {
  const std::lock_guard lock(mutex_);
  events_[handle] = false;
}

void FakeBackend::Reach(const std::string& handle) {
  {
    const std::lock_guard lock(mutex_);
    events_[handle] = true;
  }
  changed_.notify_all();
}

int64_t FakeBackend::imported() const {
  const std::lock_guard lock(mutex_);
  int64_t imported = imported_events_;
  for (const auto& [data, times] : imported_memory_) imported += times;
  return imported;
}

void FakeBackend::RefuseImports(Status status) {
  const std::lock_guard lock(mutex_);
  import_refusal_ = std::move(status);
}

Result<ImportedMemory> FakeBackend::ImportMemory(std::string_view handle) {
  const std::lock_guard lock(mutex_);
  ATTEND_RETURN_IF_ERROR(memory_imports_.Next());
  ATTEND_RETURN_IF_ERROR(import_refusal_);
  const auto found = lent_.find(handle);
  if (found == lent_.end()) return InvalidArgument("the memory handle is unknown");
  ++imported_memory_[found->second.data];
  return found->second;
}

void FakeBackend::ReleaseMemory(char* data) {
  const std::lock_guard lock(mutex_);
  EXPECT_GT(imported_memory_[data], 0) << "released what was not imported";
  --imported_memory_[data];
}

Result<std::unique_ptr<DeviceEvent>> FakeBackend::ImportEvent(std::string_view handle) {
  const std::lock_guard lock(mutex_);
  ATTEND_RETURN_IF_ERROR(event_imports_.Next());
  if (events_.find(handle) == events_.end()) {
    return InvalidArgument("the event handle is unknown");
  }
  ++imported_events_;
  return std::unique_ptr<DeviceEvent>(std::make_unique<FakeEvent>(*this, std::string(handle)));
}

void FakeBackend::Await(const std::vector<WorkItem>& items) {
  for (const WorkItem& item : items) {
    for (const DeviceEvent* event : item.after) {
      if (event == nullptr) continue;
      EXPECT_EQ(items.size(), 1u) << "an item that waits has company";
      if (FakeStream::Knows(event)) continue;  // RunItems waits, unless the item fails anyway
      const auto* const fake = dynamic_cast<const FakeEvent*>(event);
      ASSERT_NE(fake, nullptr);
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return events_.at(fake->handle()); });
    }
  }
}

}  // namespace attend::test
