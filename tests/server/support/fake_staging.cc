// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/fake_staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr uintptr_t kAlignment = 256;

}  // namespace

// Held by copies too, so that it outlives them.
struct FakeStream::Event final : DeviceEvent {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void Reach() {
    const std::lock_guard lock(mutex);
    reached = true;
    changed.notify_all();
  }
};

class FakeStream::FakeStaging final : public Staging {
 public:
  FakeStaging(FakeStream& stream, const HostSpan& host, std::shared_ptr<void> owner)
      : stream_(stream),
        host_(host),
        owner_(std::move(owner)),
        memory_(std::make_shared<Memory>(host)),
        event_(std::make_shared<Event>()) {}

  ~FakeStaging() override {
    // In stream order: work enqueued earlier still uses both.
    stream_.Enqueue([&stream = stream_, bytes = host_.bytes, memory = std::move(memory_),
                     owner = std::move(owner_)]() mutable {
      memory.reset();
      {
        const std::lock_guard lock(stream.mutex_);
        stream.device_bytes_ -= bytes;
      }
      owner.reset();
    });
  }

  Status Copy(int64_t offset, int64_t bytes) override {
    {
      const std::lock_guard lock(stream_.mutex_);
      ATTEND_RETURN_IF_ERROR(stream_.copies_.Next());
    }
    EXPECT_FALSE(finished_) << "a copy after the last";
    EXPECT_GT(bytes, 0);
    EXPECT_GE(offset, 0);
    EXPECT_LE(offset, host_.bytes - bytes);
    const char* const from = static_cast<const char*>(host_.data) + offset;
    // Bytes complete now are read by the device later.
    std::string now(from, static_cast<size_t>(bytes));
    stream_.Enqueue([memory = memory_, from, offset, now = std::move(now)] {
      EXPECT_EQ(std::memcmp(from, now.data(), now.size()), 0) << "changed while it was copied";
      memory->Write(offset, from, static_cast<int64_t>(now.size()));
    });
    return Status();
  }

  Status Finish() override {
    {
      const std::lock_guard lock(stream_.mutex_);
      ATTEND_RETURN_IF_ERROR(stream_.finishes_.Next());
    }
    EXPECT_FALSE(std::exchange(finished_, true)) << "twice";
    stream_.Enqueue([event = event_, memory = memory_] {
      EXPECT_TRUE(memory->Whole()) << "bytes were not copied";
      event->Reach();
    });
    return Status();
  }

  char* data() const override { return memory_->data; }
  const DeviceEvent* after() const override {
    EXPECT_TRUE(finished_);
    return event_.get();
  }

 private:
  struct Memory {
    explicit Memory(const HostSpan& host)
        : block(test::MakeBlock(host.bytes + static_cast<int64_t>(kAlignment))),
          data(reinterpret_cast<char*>(block.get()) +
               reinterpret_cast<uintptr_t>(host.data) % kAlignment),
          came(static_cast<size_t>(host.bytes)) {
      std::memset(data, 0xFF, came.size());
    }
    // On the stream's thread.
    void Write(int64_t offset, const char* from, int64_t bytes) {
      for (int64_t i = offset; i < offset + bytes; ++i) {
        EXPECT_FALSE(came[static_cast<size_t>(i)]) << "byte " << i << " twice";
        came[static_cast<size_t>(i)] = true;
      }
      std::memcpy(data + offset, from, static_cast<size_t>(bytes));
    }
    bool Whole() const {
      for (const bool each : came) {
        if (!each) return false;
      }
      return true;
    }

    test::Block block;
    char* const data;
    std::vector<bool> came;
  };

  FakeStream& stream_;
  const HostSpan host_;
  std::shared_ptr<void> owner_;
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Event> event_;
  bool finished_ = false;
};

FakeStream::~FakeStream() {
  Release();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  EXPECT_EQ(device_bytes_, 0) << "device memory was kept";
}

Result<std::unique_ptr<Staging>> FakeStream::MakeStaging(const HostSpan& host,
                                                         std::shared_ptr<void> owner) {
  {
    const std::lock_guard lock(mutex_);
    ATTEND_RETURN_IF_ERROR(makes_.Next());
    device_bytes_ += host.bytes;
  }
  return std::unique_ptr<Staging>(std::make_unique<FakeStaging>(*this, host, std::move(owner)));
}

void FakeStream::Hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void FakeStream::Release() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();  // under the lock: the stream may be gone right after
}

void FakeStream::FailMake(int n, Status status) {
  const std::lock_guard lock(mutex_);
  makes_.FailNth(n, std::move(status));
}

void FakeStream::FailCopy(int n, Status status) {
  const std::lock_guard lock(mutex_);
  copies_.FailNth(n, std::move(status));
}

void FakeStream::FailFinish(int n, Status status) {
  const std::lock_guard lock(mutex_);
  finishes_.FailNth(n, std::move(status));
}

void FakeStream::ForgetFaults() {
  const std::lock_guard lock(mutex_);
  for (CallFaults* each : {&makes_, &copies_, &finishes_}) each->Forget();
}

FakeStream::Counts FakeStream::counts() const {
  const std::lock_guard lock(mutex_);
  return {makes_.calls(), copies_.calls(), finishes_.calls(), device_bytes_,
          static_cast<int64_t>(work_.size()) + (working_ ? 1 : 0)};
}

bool FakeStream::Knows(const DeviceEvent* event) {
  return dynamic_cast<const Event*>(event) != nullptr;
}

Status FakeStream::WaitFor(const DeviceEvent* event) {
  auto* const fake = const_cast<Event*>(dynamic_cast<const Event*>(event));
  if (fake == nullptr) return Internal("an event of another device");
  std::unique_lock lock(fake->mutex);
  fake->changed.wait(lock, [fake] { return fake->reached; });
  return Status();
}

void FakeStream::Enqueue(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void FakeStream::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return (!held_ && !work_.empty()) || (stop_ && work_.empty()); });
    if (work_.empty()) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    working_ = true;
    lock.unlock();
    work();
    work = nullptr;  // its resources are freed before it counts as done
    lock.lock();
    working_ = false;
  }
}

}  // namespace attend::test
