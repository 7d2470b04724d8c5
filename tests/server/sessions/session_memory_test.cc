// SPDX-License-Identifier: Apache-2.0
//
// Memory for sessions on a device other than the host.

#include "server/sessions/session_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

constexpr int64_t kPageBytes = 4096;

TEST(SessionMemoryTest, DebugBuildsPoisonFreedDeviceMemory) {
#ifdef NDEBUG
  GTEST_SKIP() << "only debug builds do";
#endif
  SessionOptions options{.tenant_weights = {1}};
  options.page_rows = 16;
  options.slab_bytes = 4 * kPageBytes;
  auto arena = std::make_unique<test::TestArena>(options.slab_bytes + kPageUnitBytes, false);
  char* const base = static_cast<char*>(arena->memory().data);
  std::memset(base, 0, static_cast<size_t>(arena->memory().bytes));
  const test::ManualClock clock;
  std::vector<std::unique_ptr<DeviceArena>> arenas;
  arenas.push_back(std::move(arena));
  SessionMemory memory(std::move(arenas), options, clock);
  SessionTable& table = memory.table();

  const auto made = table.Create(0, {.layers = {{DType::kFloat16, 1, 8, 8}}});
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  const CacheUse use{made->id, 0, 0, ""};
  PageNumber page = 0;
  const auto hold = table.Hold(0, {&use, 1}, 1);
  ASSERT_TRUE(hold.ok()) << hold.status().ToString();
  ASSERT_TRUE((*hold)->Reserve(&page, 1).ok());
  (*hold)->Commit();
  (*hold)->End();
  const char* const data = base + int64_t{page} * kPageUnitBytes;
  const auto poisoned = [&] { return std::count(data, data + kPageBytes, '\xff'); };
  EXPECT_EQ(poisoned(), 0);
  ASSERT_TRUE(table.Free(0, made->id).ok());
  EXPECT_EQ(poisoned(), kPageBytes);
  EXPECT_EQ(std::count(base, base + options.slab_bytes + kPageUnitBytes, '\xff'), kPageBytes);
}

}  // namespace
}  // namespace attend
