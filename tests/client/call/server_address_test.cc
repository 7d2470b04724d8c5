// SPDX-License-Identifier: Apache-2.0

#include "client/call/server_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <utility>

namespace attend::client {
namespace {

TEST(ServerAddress, ThePortIsOptional) {
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

TEST(ServerAddress, InvalidAddressesAreRefusedWithTheReason) {
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

TEST(ServerAddress, ListsOfMixedFamiliesAreRefused) {
  EXPECT_EQ(*ServerTarget("127.0.0.1,10.0.0.2:70"), "ipv4:127.0.0.1:8001,10.0.0.2:70");
  EXPECT_EQ(*ServerTarget("[::1]:7,fe80::1"), "ipv6:[::1]:7,[fe80::1]:8001");
  for (const auto& [given, why] : {
           std::pair{"127.0.0.1,[::1]:70", "of IPv4 or of IPv6"},
           std::pair{"127.0.0.1,h:1", "h is not one"},
           std::pair{"h:1,127.0.0.1", "h is not one"},
           std::pair{"127.0.0.1,", "before or after a comma"},
           std::pair{",127.0.0.1", "before or after a comma"},
           std::pair{"127.0.0.1,127.0.0.2:x", "port \"x\""},
           std::pair{"127.0.0.1,unix:/a", "unix:/a is not one"},
       }) {
    const Result<std::string> result = ServerTarget(given);
    ASSERT_FALSE(result.ok()) << given << " is " << *result;
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(result.status().message(), ::testing::HasSubstr(why)) << given;
  }
}

TEST(ServerAddress, TargetsHaveHostAndPort) {
  for (const auto& [target, host, port] : {
           std::tuple{"h:1", "h", "1"},
           std::tuple{"[::1]:2", "::1", "2"},
           std::tuple{"dns:h:3", "h", "3"},
           std::tuple{"dns:///h:4", "h", "4"},
           std::tuple{"dns://127.0.0.1:53/h:5", "h", "5"},
           std::tuple{"dns:h", "h", ""},
           std::tuple{"ipv4:127.0.0.1:6,127.0.0.2:7", "127.0.0.1", "6"},
           std::tuple{"ipv6:[::1]:8,[::2]:9", "::1", "8"},
           std::tuple{"dns://h", "", ""},
       }) {
    const HostAndPort parsed = ParseTarget(target);
    EXPECT_EQ(parsed.host, host) << target;
    EXPECT_EQ(parsed.port, port) << target;
  }
}

TEST(ServerAddress, NamesAndListsMayBeSeveralServers) {
  for (const char* target : {"h:1", "unixes.lan:1", "dns:h:1", "dns:///h:1", "dns://127.0.0.1/h:1",
                             "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1,[::2]:1"}) {
    EXPECT_TRUE(MayBeSeveral(target)) << target;
  }
  for (const char* target :
       {"127.0.0.1:1", "[::1]:1", "[fe80::1%eth0]:1", "localhost:1", "dns:///localhost:1",
        "dns:127.0.0.1:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "unix:a,b", "unix-abstract:a"}) {
    EXPECT_FALSE(MayBeSeveral(target)) << target;
  }
  EXPECT_TRUE(IsList("ipv4:127.0.0.1:1,127.0.0.2:1"));
  EXPECT_FALSE(IsList("unix:a,b"));
}

TEST(ServerAddress, PeersAreParsedAsServers) {
  for (const auto& [peer, server] : {
           std::pair{"ipv4:127.0.0.1:8001", "127.0.0.1:8001"},
           std::pair{"ipv6:%5B::1%5D:8001", "[::1]:8001"},
           std::pair{"ipv6:%5Bfe80::1%25eth0%5D:1", "[fe80::1%eth0]:1"},
           std::pair{"ipv6:[::1]:8001", "[::1]:8001"},
           std::pair{"unix:/run/a.sock", "unix:/run/a.sock"},
       }) {
    EXPECT_EQ(ServerOfPeer(peer), server);
    EXPECT_TRUE(ServerTarget(server).ok()) << server;
  }
}

}  // namespace
}  // namespace attend::client
