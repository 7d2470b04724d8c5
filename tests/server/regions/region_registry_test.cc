// SPDX-License-Identifier: Apache-2.0

#include "server/regions/region_registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/kernels/support/problems.h"
#include "tests/server/support/region_registry_fixture.h"

namespace attend {
namespace {

using test::kPage;
using test::kReturnWait;
using RegionRegistryTest = test::RegionRegistryFixture;

TEST_F(RegionRegistryTest, ARegionIsFoundByItsTokenUntilItIsReleased) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  Result<RegionRegistry::Created> created = registry_->Create(client, 1);
  ASSERT_TRUE(created.ok());
  EXPECT_EQ(created->bytes, kPage) << "whole pages";
  EXPECT_TRUE(created->file.valid());
  {
    const RegionRef found = registry_->Find(created->token, 0);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->bytes, kPage);
    EXPECT_NE(found->data, nullptr);
    EXPECT_EQ(found->token, created->token);
  }
  const RegionRegistry::Stats stats = registry_->stats();
  EXPECT_EQ(stats.clients, 1);
  EXPECT_EQ(stats.regions, 1);
  EXPECT_EQ(stats.bytes, kPage);
  EXPECT_EQ(stats.changing_bytes, 0);
  EXPECT_TRUE(registry_->Release(client, created->token).ok());
  EXPECT_EQ(registry_->Find(created->token, 0), nullptr);
  EXPECT_EQ(registry_->Release(client, created->token).code(), Code::kNotFound);
  WaitUntilTaken(0);
  EXPECT_EQ(memory_.mapped(), 0u);
  EXPECT_EQ(registry_->stats().created, 1);
}

TEST_F(RegionRegistryTest, AClientsTokensEndWithItAndOthersStay) {
  const uint64_t leaving = registry_->AddClient(SharedRegion::kAnyTenant);
  const uint64_t staying = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string first = MustCreate(leaving, kPage);
  const std::string second = MustCreate(leaving, 2 * kPage);
  const std::string other = MustCreate(staying, 3 * kPage);
  registry_->RemoveClient(leaving);
  EXPECT_EQ(registry_->Find(first, 0), nullptr);
  EXPECT_EQ(registry_->Find(second, 0), nullptr);
  EXPECT_NE(registry_->Find(other, 0), nullptr);
  WaitUntilTaken(3 * kPage);
  EXPECT_EQ(registry_->stats().clients, 1);
  registry_->RemoveClient(leaving);  // a second call does nothing
  EXPECT_EQ(registry_->stats().clients, 1);
  EXPECT_FALSE(registry_->Create(leaving, kPage).ok()) << "the dead make no regions";
}

TEST_F(RegionRegistryTest, AClientCannotReleaseAnothersRegion) {
  const uint64_t owner = registry_->AddClient(SharedRegion::kAnyTenant);
  const uint64_t thief = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string token = MustCreate(owner, kPage);
  EXPECT_EQ(registry_->Release(thief, token).code(), Code::kNotFound);
  EXPECT_NE(registry_->Find(token, 0), nullptr);
  EXPECT_EQ(registry_->Release(owner, "").code(), Code::kNotFound);
}

TEST_F(RegionRegistryTest, ARegionInUseKeepsItsMemoryAndQuota) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string token = MustCreate(client, 8 * kPage);
  RegionRef used = registry_->Find(token, 0);
  std::memset(used->data, 7, static_cast<size_t>(used->bytes));
  ASSERT_TRUE(registry_->Release(client, token).ok());
  EXPECT_EQ(registry_->Find(token, 0), nullptr);
  EXPECT_EQ(registry_->stats().changing_bytes, 8 * kPage);
  EXPECT_EQ(registry_->stats().regions, 0);
  ExpectRefused(client, kPage, Code::kResourceExhausted, "32768 bytes of the connection's limit");
  EXPECT_EQ(used->data[used->bytes - 1], 7);
  EXPECT_EQ(memory_.mapped(), 1u);
  used.reset();
  WaitUntilTaken(0);
  EXPECT_EQ(memory_.mapped(), 0u);
  MustCreate(client, kPage);
}

TEST_F(RegionRegistryTest, AUseOutlivesTheClient) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string token = MustCreate(client, 4 * kPage);
  RegionRef used = registry_->Find(token, 0);
  registry_->RemoveClient(client);
  EXPECT_EQ(registry_->Find(token, 0), nullptr);
  EXPECT_EQ(taken(), 4 * kPage);
  used->data[0] = 1;
  used.reset();
  WaitUntilTaken(0);
}

TEST_F(RegionRegistryTest, TheLastUseDoesNotWaitForUnlocking) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string token = MustCreate(client, kPage);
  RegionRef used = registry_->Find(token, 0);
  ASSERT_TRUE(registry_->Release(client, token).ok());
  memory_.Hold();
  used.reset();  // hangs here if it waits
  memory_.WaitForUnlocking(1);
  EXPECT_NE(memory_.unlocker(), std::this_thread::get_id());
  EXPECT_EQ(taken(), kPage) << "still locked, still counted";
  EXPECT_NE(registry_->AddClient(SharedRegion::kAnyTenant), 0u);
  memory_.Release();
  WaitUntilTaken(0);
}

TEST_F(RegionRegistryTest, ReleasedMemoryCanBeTakenAtOnce) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  for (int i = 0; i < 100; ++i) {
    const std::string token = MustCreate(client, 8 * kPage);
    ASSERT_TRUE(registry_->Release(client, token).ok());
  }
}

TEST_F(RegionRegistryTest, AHangingDeviceIsAwaitedOnlyUntilTheLimit) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  const std::string token = MustCreate(client, 8 * kPage);
  memory_.Hold();
  ASSERT_TRUE(registry_->Release(client, token).ok());
  memory_.WaitForUnlocking(1);
  EXPECT_EQ(WaitFor(client, kPage), clock_.Now() + kReturnWait);
  clock_.Advance(kReturnWait);
  ExpectRefused(client, kPage, Code::kResourceExhausted, "32768 bytes of the connection's limit");
  memory_.Release();
  WaitUntilTaken(0);
  MustCreate(client, 8 * kPage);
}

TEST_F(RegionRegistryTest, OthersReleasesDoNotExtendTheWait) {
  const uint64_t churns = registry_->AddClient(SharedRegion::kAnyTenant);
  const uint64_t waits = registry_->AddClient(SharedRegion::kAnyTenant);
  MustCreate(registry_->AddClient(SharedRegion::kAnyTenant), 8 * kPage);
  const std::string first = MustCreate(churns, 4 * kPage), second = MustCreate(churns, 4 * kPage);
  const auto release = [&](const std::string& token, int count) {
    memory_.Hold();
    ASSERT_TRUE(registry_->Release(churns, token).ok());
    memory_.WaitForUnlocking(count);
  };
  release(first, 1);
  const TimePoint until = clock_.Now() + kReturnWait;
  EXPECT_EQ(WaitFor(waits, 8 * kPage), until);
  clock_.Advance(kReturnWait / 2);
  memory_.Release();
  WaitUntilTaken(12 * kPage);
  release(second, 2);
  const TimePoint again = WaitFor(waits, 8 * kPage);
  clock_.Advance(kReturnWait / 2);
  const TimePoint at_last = WaitFor(waits, 8 * kPage);
  memory_.Release();
  EXPECT_EQ(again, until);
  EXPECT_EQ(at_last, TimePoint()) << "it is refused";
  WaitUntilTaken(8 * kPage);
  MustCreate(waits, 8 * kPage);
}

TEST_F(RegionRegistryTest, QuotasOfAClientAndOfAllClients) {
  const uint64_t first = registry_->AddClient(SharedRegion::kAnyTenant);
  const uint64_t second = registry_->AddClient(SharedRegion::kAnyTenant);
  const uint64_t third = registry_->AddClient(SharedRegion::kAnyTenant);
  ExpectRefused(first, 0, Code::kInvalidArgument, "must have at least 1");
  ExpectRefused(first, 8 * kPage + 1, Code::kInvalidArgument, "shared-memory-client-max, 32768");
  ExpectRefused(first, 16 * kPage + 1, Code::kInvalidArgument, "shared-memory-max, 65536");
  ExpectRefused(first, UINT64_MAX, Code::kInvalidArgument, "18446744073709551615 bytes");
  ExpectRefused(first, uint64_t{1} << 63, Code::kInvalidArgument, "shared-memory-max");
  MustCreate(first, 5 * kPage);
  ExpectRefused(first, 4 * kPage, Code::kResourceExhausted,
                "20480 bytes of the connection's limit");
  MustCreate(first, 3 * kPage);
  MustCreate(second, 6 * kPage);
  ExpectRefused(third, 3 * kPage, Code::kResourceExhausted,
                "bytes: too little of the limit for all regions");
  const std::string last = MustCreate(third, 2 * kPage);
  ExpectRefused(second, 1, Code::kResourceExhausted,
                "bytes: too little of the limit for all regions");
  ASSERT_TRUE(registry_->Release(third, last).ok());
  MustCreate(second, 1);
}

TEST_F(RegionRegistryTest, ATenantsClientsShareItsLimit) {
  std::vector<TenantBounds> bounds(2);
  bounds[0][Limit::kSharedMemory] = kPage;
  bounds[1][Limit::kSharedMemory] = 4 * kPage;
  TenantLimits tenants(bounds, clock_);
  RegionLimits limits{{1, 1}, 16 * kPage, 8 * kPage, 3};
  limits.tenants = &tenants;
  Restart(limits);
  const uint64_t one = registry_->AddClient(1);
  const uint64_t two = registry_->AddClient(1);
  const uint64_t other = registry_->AddClient(0);
  const std::string token = MustCreate(one, 3 * kPage);
  ExpectRefused(two, 2 * kPage, Code::kResourceExhausted,
                "tenant limit shared-memory: the tenant has 12288 and asks for 8192 more, may have "
                "at most 16384");
  MustCreate(two, 1);
  MustCreate(other, kPage);
  // counts for the first tenant
  const uint64_t nobodys = registry_->AddClient(SharedRegion::kAnyTenant);
  ExpectRefused(nobodys, kPage, Code::kResourceExhausted, "tenant limit shared-memory");
  EXPECT_EQ(tenants.use(1, Limit::kSharedMemory).used, 4 * kPage);
  EXPECT_EQ(tenants.use(1, Limit::kSharedMemory).refused, 1);
  // A region counts until its memory is closed, even if its client has gone.
  RegionRef used = registry_->Find(token, 1);
  registry_->RemoveClient(one);
  ExpectRefused(two, kPage, Code::kResourceExhausted, "the tenant has 16384");
  used.reset();
  // waits for the memory being closed; that is not counted as a refusal
  MustCreate(two, 3 * kPage);
  EXPECT_EQ(tenants.use(1, Limit::kSharedMemory).refused, 2);
  registry_.reset();
  EXPECT_EQ(tenants.use(1, Limit::kSharedMemory).used, 0);
}

TEST_F(RegionRegistryTest, CreatingARegionIsChargedToItsTenant) {
  std::vector<TenantBounds> bounds(2);
  bounds[1].bytes = {kPage, 2 * kPage};
  TenantLimits tenants(bounds, clock_);
  RegionLimits limits{{1, 1}, 16 * kPage, 16 * kPage, 9};
  limits.tenants = &tenants;
  Restart(limits);
  const uint64_t one = registry_->AddClient(1);
  const std::string token = MustCreate(one, 4 * kPage);
  EXPECT_EQ(tenants.use(1, Limit::kBytes).used, 4 * kPage);
  ASSERT_TRUE(registry_->Release(one, token).ok());
  ExpectRefused(one, kPage, Code::kResourceExhausted, "tenant limit bytes-per-second");
  MustCreate(registry_->AddClient(0), kPage);
  clock_.Advance(std::chrono::seconds(3));
  MustCreate(one, kPage);
  registry_.reset();
  EXPECT_EQ(tenants.use(1, Limit::kSharedMemory).used, 0);
}

TEST_F(RegionRegistryTest, TheNumberOfRegionsIsBounded) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  MustCreate(client, 1);
  MustCreate(client, 1);
  const std::string third = MustCreate(client, 1);
  ExpectRefused(client, 1, Code::kResourceExhausted, "has 3 regions, may have at most 3");
  ASSERT_TRUE(registry_->Release(client, third).ok());
  MustCreate(client, 1);
}

TEST_F(RegionRegistryTest, AFailedCreationLeavesNothing) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  memory_.Refuse(ResourceExhausted("no pages"));
  ExpectRefused(client, kPage, Code::kResourceExhausted, "no pages");
  EXPECT_EQ(taken(), 0);
  token_fault_ = Internal("no randomness");
  ExpectRefused(client, 8 * kPage, Code::kInternal, "no randomness");
  token_fault_ = Status();
  WaitUntilTaken(0);
  repeat_tokens_ = true;
  const std::string token = MustCreate(client, kPage);
  ExpectRefused(client, kPage, Code::kInternal, "the new token is already in use");
  repeat_tokens_ = false;
  EXPECT_NE(registry_->Find(token, 0), nullptr);
  WaitUntilTaken(kPage);
  MustCreate(client, 7 * kPage);
}

TEST_F(RegionRegistryTest, DestructionFreesEverything) {
  const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
  MustCreate(client, kPage);
  MustCreate(client, kPage);
  registry_.reset();
  EXPECT_EQ(memory_.mapped(), 0u);
}

// Clients come, go and use each other's regions from many threads; every count must return to zero.
TEST_F(RegionRegistryTest, CountsReturnToZeroUnderManyThreads) {
  Restart({{1}, 64 * kPage, 16 * kPage, 8});
  std::mutex mutex;
  std::vector<std::string> tokens;
  std::atomic<bool> stop{false};
  std::vector<std::thread> users;
  for (int u = 0; u < 2; ++u) {
    users.emplace_back([&, u] {
      std::mt19937_64 random(test::FreshSeed() + static_cast<uint64_t>(u));
      std::vector<RegionRef> held;
      while (!stop) {
        std::string token;
        {
          const std::lock_guard lock(mutex);
          if (!tokens.empty()) token = tokens[random() % tokens.size()];
        }
        if (RegionRef found = registry_->Find(token, 0)) {
          found->data[u] = 1;  // a byte of its own: regions are shared by their users
          held.push_back(std::move(found));
        }
        if (held.size() > 4) held.erase(held.begin() + static_cast<long>(random() % held.size()));
        std::this_thread::yield();
      }
    });
  }
  std::mt19937_64 random(test::FreshSeed());
  for (int round = 0; round < 200; ++round) {
    const uint64_t client = registry_->AddClient(SharedRegion::kAnyTenant);
    for (int i = 0; i < 4; ++i) {
      Result<RegionRegistry::Created> created =
          registry_->Create(client, 1 + random() % (4 * kPage));
      if (!created.ok()) continue;
      const std::lock_guard lock(mutex);
      tokens.push_back(created->token);
      if (tokens.size() > 8) tokens.erase(tokens.begin());
    }
    registry_->RemoveClient(client);
  }
  stop = true;
  for (std::thread& user : users) user.join();
  WaitUntilTaken(0);
  EXPECT_EQ(registry_->stats().regions, 0);
  EXPECT_EQ(memory_.mapped(), 0u);
}

}  // namespace
}  // namespace attend
