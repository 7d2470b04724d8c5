// SPDX-License-Identifier: Apache-2.0
//
// A registry of regions on counted memory and a manual clock.

#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "server/regions/region_registry.h"
#include "tests/kernels/support/manual_clock.h"

namespace attend::test {

inline constexpr int64_t kPage = 4096;
inline constexpr Duration kReturnWait = std::chrono::minutes(1);

// Memory that counts its regions, can refuse them and can block their release.
class FakeRegionMemory final : public RegionMemory {
 public:
  ~FakeRegionMemory() override { EXPECT_TRUE(mapped_.empty()) << "regions were left mapped"; }

  Result<RegionMapping> Map(int64_t bytes) override {
    EXPECT_EQ(bytes % kPage, 0);
    const std::lock_guard lock(mutex_);
    if (!refusal_.ok()) return std::exchange(refusal_, Status());
    RegionMapping mapping;
    mapping.file = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    mapping.bytes = bytes;
    auto memory = std::make_unique<char[]>(static_cast<size_t>(bytes));
    mapping.data = memory.get();
    mapped_.emplace(mapping.data, std::move(memory));
    return mapping;
  }
  void Unlock(void* data, int64_t bytes) override {
    EXPECT_GT(bytes, 0);
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(mapped_.contains(data)) << "unlocked what was not mapped";
    EXPECT_TRUE(unlocked_.insert(data).second) << "unlocked twice";
    unlocker_ = std::this_thread::get_id();
    ++unlocking_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !held_; });
  }
  void Unmap(void* data, int64_t bytes, Pages pages) override {
    EXPECT_GT(bytes, 0);
    const std::lock_guard lock(mutex_);
    kept_ += pages == Pages::kKept ? bytes : 0;
    EXPECT_EQ(unlocked_.erase(data), 1u) << "unmapped what is locked";
    EXPECT_EQ(mapped_.erase(data), 1u) << "unmapped what was not mapped";
  }
  int64_t page_bytes() const override { return kPage; }

  void Refuse(Status status) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(status);
  }
  // Unlocking waits for Release from now on.
  void Hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  void WaitForUnlocking(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return unlocking_ >= count; });
  }
  size_t mapped() {
    const std::lock_guard lock(mutex_);
    return mapped_.size();
  }
  int64_t kept() {  // bytes unmapped but left to clients
    const std::lock_guard lock(mutex_);
    return kept_;
  }
  std::thread::id unlocker() {
    const std::lock_guard lock(mutex_);
    return unlocker_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<void*, std::unique_ptr<char[]>> mapped_;
  Status refusal_;
  bool held_ = false;
  std::set<void*> unlocked_;
  int unlocking_ = 0;
  int64_t kept_ = 0;
  std::thread::id unlocker_;
};

class RegionRegistryFixture : public ::testing::Test {
 protected:
  RegionRegistryFixture() { Restart({{1}, 16 * kPage, 8 * kPage, 3}); }

  void Restart(RegionLimits limits) {
    limits.return_wait = kReturnWait;
    registry_.reset();
    const auto tokens = [this]() -> Result<std::string> {
      if (!token_fault_.ok()) return token_fault_;
      return repeat_tokens_ ? std::string(16, 'r')
                            : "token-" + std::to_string(1000000000 + ++made_);
    };
    registry_ = std::make_unique<RegionRegistry>(limits, memory_, clock_, tokens);
  }
  // Retries while memory is being closed.
  Result<RegionRegistry::Created> Create(uint64_t client, uint64_t bytes) {
    for (;;) {
      TimePoint until = {};
      Result<RegionRegistry::Created> created = registry_->Create(client, bytes, &until);
      if (until == TimePoint()) return created;
      std::this_thread::yield();
    }
  }
  // How long the client may wait for memory that is not available now; none: it was refused, or
  // succeeded.
  TimePoint WaitFor(uint64_t client, uint64_t bytes) {
    const RegionRegistry::Stats before = registry_->stats();
    TimePoint until = {};
    const Result<RegionRegistry::Created> created = registry_->Create(client, bytes, &until);
    EXPECT_TRUE(until == TimePoint() || !created.ok());
    const bool refused = until == TimePoint() && !created.ok();
    EXPECT_EQ(registry_->stats().refused, before.refused + (refused ? 1 : 0));
    return until;
  }
  std::string MustCreate(uint64_t client, int64_t bytes) {
    Result<RegionRegistry::Created> created = Create(client, bytes);
    EXPECT_TRUE(created.ok()) << created.status().ToString();
    return created.ok() ? created->token : "";
  }
  // Waits for pending releases: only a thread does them.
  void WaitUntilTaken(int64_t bytes) {
    while (taken() != bytes) std::this_thread::yield();
  }
  int64_t taken() const {
    const RegionRegistry::Stats stats = registry_->stats();
    return stats.bytes + stats.changing_bytes;
  }
  void ExpectRefused(uint64_t client, uint64_t bytes, Code code, const std::string& part) {
    const RegionRegistry::Stats before = registry_->stats();
    const Result<RegionRegistry::Created> created = Create(client, bytes);
    ASSERT_FALSE(created.ok());
    EXPECT_EQ(created.status().code(), code) << created.status().ToString();
    EXPECT_NE(created.status().message().find(part), std::string::npos)
        << created.status().message();
    const RegionRegistry::Stats after = registry_->stats();
    EXPECT_EQ(after.refused, before.refused + 1);
    EXPECT_EQ(after.created, before.created);
    EXPECT_EQ(after.bytes, before.bytes);
  }

  ManualClock clock_;
  FakeRegionMemory memory_;
  int made_ = 0;
  bool repeat_tokens_ = false;
  Status token_fault_;
  std::unique_ptr<RegionRegistry> registry_;
};

}  // namespace attend::test
