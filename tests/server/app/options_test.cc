// SPDX-License-Identifier: Apache-2.0

#include "server/app/options.h"

#include <gtest/gtest.h>

#include <vector>

#include "server/util/thresholds.h"

namespace attend {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

Config SmallConfig() {
  Config config;
  config.memory_budget_bytes = kGiB;
  config.message_memory_max_bytes = kGiB;
  config.shared_memory = false;
  config.session_memory_bytes = 4 * kGiB;
  config.check_threads = 3;
  return config;
}

DeviceInfo Device(DeviceKind kind) {
  DeviceInfo device;
  device.kind = kind;
  device.memory_bytes = 80 * kGiB;
  return device;
}

TEST(ServerId, IsRandomUnlessGiven) {
  Result<std::string> random = std::string(
      "\x01\xab\x00\xff"
      "0123456789ab",
      16);
  const auto source = [&] { return random; };
  EXPECT_EQ(*ServerId(Config(), source), "01ab00ff30313233");
  Config config;
  config.server_id = "attend-0";
  EXPECT_EQ(*ServerId(config, source), "attend-0");
  random = Status(Code::kInternal, "no entropy");
  EXPECT_EQ(ServerId(Config(), source).status().message(), "no entropy");
}

TEST(MemoryMost, CountsSessionsOnlyInHostMemory) {
  const Config config = SmallConfig();
  const int64_t none = MemoryMost(config, {});
  EXPECT_GT(none, 2 * kGiB);
  const std::vector<DeviceInfo> cpu = {Device(DeviceKind::kCpu)};
  EXPECT_EQ(MemoryMost(config, cpu), none + 4 * kGiB);
  // Sessions on a GPU take no host memory; the copies that checks make of them are charged to the
  // budget.
  const std::vector<DeviceInfo> gpus = {Device(DeviceKind::kCuda), Device(DeviceKind::kCuda)};
  EXPECT_EQ(MemoryMost(config, gpus), none);
  const std::vector<DeviceInfo> both = {cpu[0], gpus[0]};
  EXPECT_EQ(MemoryMost(config, both), none + 4 * kGiB);
}

TEST(MemoryMost, CountsDumpsOfSessions) {
  for (const DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kCuda}) {
    Config config = SmallConfig();
    const std::vector<DeviceInfo> device = {Device(kind)};
    const int64_t without = MemoryMost(config, device);
    config.check_dump_dir = "dumps";
    EXPECT_EQ(MemoryMost(config, device), without + 3 * thresholds::kCheckedKeysBytesMax);
  }
}

TEST(MemoryMost, WithoutSessionsDumpsCopyNoKeys) {
  Config config = SmallConfig();
  config.session_memory_bytes = 0;
  config.check_dump_dir = "dumps";
  const std::vector<DeviceInfo> gpu = {Device(DeviceKind::kCuda)};
  EXPECT_EQ(MemoryMost(config, gpu), MemoryMost(config, {}));
}

TEST(MemoryMost, CountsDisplacedRegionsThatClientsKeep) {
  Config config = SmallConfig();
  const int64_t none = MemoryMost(config, {});
  config.shared_memory = true;
  EXPECT_EQ(MemoryMost(config, {}), none + config.shared_memory_max_bytes);
  config.tokens = "tokens";
  EXPECT_EQ(MemoryMost(config, {}), none + 2 * config.shared_memory_max_bytes);
}

TEST(SessionBytes, DefaultsToAShareOfTheGpusMemory) {
  Config config = SmallConfig();
  config.session_memory_is_default = false;
  EXPECT_EQ(SessionBytes(config, Device(DeviceKind::kCuda)), 4 * kGiB);
  config.session_memory_is_default = true;
  EXPECT_EQ(SessionBytes(config, Device(DeviceKind::kCuda)), 20 * kGiB);
  EXPECT_EQ(SessionBytes(config, Device(DeviceKind::kCpu)), 4 * kGiB);
}

}  // namespace
}  // namespace attend
