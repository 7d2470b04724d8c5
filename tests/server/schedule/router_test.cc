// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/router.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace attend {
namespace {

DeviceInfo Device(DeviceKind kind, int units, int compute_capability = 0) {
  DeviceInfo info;
  info.kind = kind;
  info.units = units;
  info.compute_capability = compute_capability;
  return info;
}

std::vector<Candidate> All(int devices, int64_t cost) {
  std::vector<Candidate> candidates;
  for (int i = 0; i < devices; ++i) candidates.push_back({i, {}, 0, cost});
  return candidates;
}

TEST(Router, TheDeviceWithLeastOutstandingIsChosen) {
  Router router(std::vector<DeviceInfo>(3, Device(DeviceKind::kCuda, 100, 90)));
  EXPECT_EQ(router.Reserve(All(3, 10)), 0u);
  EXPECT_EQ(router.Reserve(All(3, 30)), 1u);
  EXPECT_EQ(router.Reserve(All(3, 5)), 2u);
  EXPECT_EQ(router.Reserve(All(3, 4)), 2u);
  EXPECT_EQ(router.Reserve(All(3, 4)), 2u);
  EXPECT_EQ(router.Reserve(All(3, 4)), 0u);
  router.Release(1, 30);
  EXPECT_EQ(router.Reserve(All(3, 4)), 1u);
  EXPECT_EQ(router.outstanding(0), 14);
  EXPECT_EQ(router.outstanding(1), 4);
  EXPECT_EQ(router.outstanding(2), 13);
}

TEST(Router, ReservationsCountForOtherReservations) {
  Router router(std::vector<DeviceInfo>(2, Device(DeviceKind::kCuda, 100, 90)));
  EXPECT_EQ(router.Expect(All(2, 10)), 0u);
  EXPECT_EQ(router.Expect(All(2, 10)), 1u);
  EXPECT_EQ(router.Expect(All(2, 10)), 0u);
  EXPECT_EQ(router.outstanding(0), 0);
  EXPECT_EQ(router.Reserve(All(2, 30)), 0u) << "a slow client keeps no device from others";
  EXPECT_EQ(router.Expect(All(2, 10)), 1u) << "30 + 20 and 10";
  router.Forget(1, 10);
  router.Forget(1, 10);
  router.Release(0, 30);
  EXPECT_EQ(router.Expect(All(2, 10)), 1u);
}

TEST(Router, OnlyCandidatesAreChosen) {
  Router router(std::vector<DeviceInfo>(3, Device(DeviceKind::kCuda, 100, 90)));
  router.Add(1, 50);
  const std::vector<Candidate> candidates = {{1, {}, 0, 5}, {2, {}, 0, 90}};
  EXPECT_EQ(router.Reserve(candidates), 0u) << "55 before 90";
  EXPECT_EQ(router.outstanding(0), 0);
  EXPECT_EQ(router.outstanding(1), 55);
}

TEST(Router, FasterDevicesGetMore) {
  Router router({Device(DeviceKind::kCpu, 16), Device(DeviceKind::kCuda, 100, 90),
                 Device(DeviceKind::kCuda, 50, 90)});
  EXPECT_EQ(router.Reserve(All(3, 100)), 1u) << "all are idle: the fastest";
  EXPECT_EQ(router.Reserve(All(3, 100)), 1u) << "200 on 100 units end with 100 on 50, the first";
  EXPECT_EQ(router.Reserve(All(3, 100)), 2u);
  // A hundredth of a GPU is 16 threads of a CPU.
  router.Add(1, 100 * 100);
  router.Add(2, 100 * 100);
  EXPECT_EQ(router.Reserve(All(3, 1)), 0u);
}

// Nothing is released meanwhile, so equal costs must be spread exactly, for every interleaving of
// the threads.
TEST(Router, AConcurrentBurstIsSpreadExactly) {
  constexpr int kDevices = 4;
  constexpr int kThreads = 8;
  constexpr int kEach = 500;
  Router router(std::vector<DeviceInfo>(kDevices, Device(DeviceKind::kCuda, 100, 90)));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&router] {
      for (int i = 0; i < kEach; ++i) router.Reserve(All(kDevices, 7));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kDevices; ++i) {
    EXPECT_EQ(router.outstanding(i), 7 * kThreads * kEach / kDevices) << i;
  }
}

TEST(Router, TheLargestCostsDoNotOverflow) {
  Router router({Device(DeviceKind::kCpu, 1)});
  for (int i = 0; i < 1000; ++i) router.Add(0, INT64_MAX);
  EXPECT_GT(router.outstanding(0), 0);
  for (int i = 0; i < 1000; ++i) router.Release(0, INT64_MAX);
  EXPECT_EQ(router.outstanding(0), 0);
}

}  // namespace
}  // namespace attend
