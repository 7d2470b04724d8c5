// SPDX-License-Identifier: Apache-2.0

#include "server/net/connection_limits.h"

#include <gtest/gtest.h>

#include "kernels/util/status.h"

namespace attend {
namespace {

TEST(ConnectionLimitsTest, FollowTheDescriptorLimit) {
  const auto limits = [](int64_t connections, int64_t per_peer, int64_t descriptors,
                         int64_t regions = 0) {
    return LimitConnections({connections, per_peer}, descriptors, regions);
  };
  const auto expect = [](const Result<ConnectionLimits>& got, int64_t connections,
                         int64_t per_peer) {
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_EQ(got->connections, connections);
    EXPECT_EQ(got->per_peer, per_peer);
  };
  expect(limits(0, 0, 200), 136, 34);  // 64 are reserved
  expect(limits(0, 0, 1024), 768, 192);
  expect(limits(0, 0, int64_t{1} << 30), 16384, 4096);
  expect(limits(0, 0, 10), 1, 1);
  expect(limits(100, 0, 1024), 100, 25);
  expect(limits(100, 500, 1024), 100, 100);
  expect(limits(960, 7, 1024), 960, 7);
  expect(limits(0, 0, 1024, 768), 192, 48);
  expect(limits(704, 7, 1024, 256), 704, 7);
  EXPECT_FALSE(limits(705, 7, 1024, 256).ok());
  expect(limits(0, 0, 321, 256), 1, 1);
  EXPECT_FALSE(limits(0, 0, 320, 256).ok()) << "there would be none";
  const Result<ConnectionLimits> refused = limits(961, 0, 1024);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("961, must be at most 960"), std::string::npos)
      << refused.status().message();
}

}  // namespace
}  // namespace attend
