// SPDX-License-Identifier: Apache-2.0

#include "client/call/server_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace attend::client {
namespace {

TEST(ServerAddress, ThePortMayBeMissing) {
  for (const auto& [given, target] : {
           std::pair{"localhost", "localhost:8001"},
           std::pair{"gpu-host.lan:9000", "gpu-host.lan:9000"},
           std::pair{"127.0.0.1", "127.0.0.1:8001"},
           std::pair{"127.0.0.1:1", "127.0.0.1:1"},
           std::pair{"h:65535", "h:65535"},
           std::pair{"::1", "[::1]:8001"},
           std::pair{"[::1]", "[::1]:8001"},
           std::pair{"[fe80::1%eth0]:70", "[fe80::1%eth0]:70"},
           std::pair{"unix:a/b.sock", "unix:a/b.sock"},
           std::pair{"unix:///a:b", "unix:///a:b"},
           std::pair{"dns:///h:1", "dns:///h:1"},
       }) {
    const Result<std::string> result = ServerTarget(given);
    ASSERT_TRUE(result.ok()) << given << ": " << result.status().ToString();
    EXPECT_EQ(*result, target);
  }
}

TEST(ServerAddress, WhatIsNoneIsRefusedWithTheReason) {
  for (const auto& [given, why] : {
           std::pair{"", "empty"},
           std::pair{"127.0.0.1:99999", "port \"99999\" must be a number in [1, 65535]"},
           std::pair{"h:0", "port"},
           std::pair{"h:", "port \"\""},
           std::pair{"h:80x", "port \"80x\""},
           std::pair{"h:+80", "port"},
           std::pair{":8001", "host is missing"},
           std::pair{"http://h:8001", "without http://"},
           std::pair{"grpc://h", "without grpc://"},
           std::pair{"h:8001/", "must be HOST:PORT"},
           std::pair{"h 8001", "must be HOST:PORT"},
           std::pair{"[::1", "between [ and ]"},
           std::pair{"[h]:1", "between [ and ]"},
           std::pair{"[::1]8001", "[IPV6]:PORT"},
           std::pair{"::1:8001:x", "[ ]"},
       }) {
    const Result<std::string> result = ServerTarget(given);
    ASSERT_FALSE(result.ok()) << given << " is " << *result;
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(result.status().message(), ::testing::HasSubstr(why));
  }
}

}  // namespace
}  // namespace attend::client
