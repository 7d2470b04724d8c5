// SPDX-License-Identifier: Apache-2.0

#include "server/net/tcp_listener.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "server/net/peer.h"
#include "tests/server/support/listener_fixture.h"

namespace attend {
namespace {

using std::chrono::seconds;
using test::ConnectTo;

TEST(TcpListenerTest, ListensByNameOrNumberAndReportsErrors) {
  const Result<TcpListeners> any = ListenTcp("0.0.0.0:0");
  ASSERT_TRUE(any.ok()) << any.status().message();
  EXPECT_GT(any->port, 0);
  const UniqueFd client = ConnectTo(any->port);
  const Result<TcpListeners> name = ListenTcp("localhost:0");
  ASSERT_TRUE(name.ok()) << name.status().message();
  ConnectTo(name->port);
  const Result<TcpListeners> again = ListenTcp("127.0.0.1:" + std::to_string(any->port));
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().message(), "Address already in use");
  EXPECT_EQ(ListenTcp("203.0.113.1:0").status().message(), "Cannot assign requested address");
  EXPECT_FALSE(ListenTcp("no.such.host.invalid:0").ok());
  EXPECT_EQ(WithPort("[::1]:0", 7), "[::1]:7");
}

TEST(TcpListenerTest, ALoopbackOnlyListenerRefusesOtherAddresses) {
  EXPECT_FALSE(IsLoopback("no.such.host.invalid:0").ok()) << "it may have any address soon";
  const auto listen = [](const std::string& address) {
    return ListenTcp(address, {}, TcpReach::kThisMachine).status().message();
  };
  for (const std::string address : {"0.0.0.0:0", "[::]:0", "203.0.113.1:0"}) {
    EXPECT_EQ(*IsLoopback(address), false) << address;
    EXPECT_EQ(listen(address), "the address is beyond loopback") << address;
  }
  for (const std::string address : {"127.0.0.1:0", "localhost:0"}) {
    EXPECT_EQ(*IsLoopback(address), true) << address;
    EXPECT_EQ(listen(address), "") << address;
  }
}

// A client whose machine has vanished sends no FIN: keepalive probes detect it.
TEST(TcpListenerTest, AcceptedSocketsHaveKeepalive) {
  const Result<TcpListeners> tcp = ListenTcp("127.0.0.1:0", {seconds(7), seconds(10)});
  ASSERT_TRUE(tcp.ok());
  const UniqueFd client = ConnectTo(tcp->port);
  pollfd polled{tcp->sockets[0].get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1);
  const UniqueFd accepted(accept(tcp->sockets[0].get(), nullptr, nullptr));
  const auto option = [&accepted](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    EXPECT_EQ(getsockopt(accepted.get(), level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), 7);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT), 12);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 10'000);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
}

TEST(PeerTest, OnlyLoopbackAddressesAreOfThisHost) {
  const auto is_loopback = [](int family, const char* text) {
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    void* const to = family == AF_INET
                         ? static_cast<void*>(&reinterpret_cast<sockaddr_in&>(address).sin_addr)
                         : &reinterpret_cast<sockaddr_in6&>(address).sin6_addr;
    EXPECT_EQ(inet_pton(family, text, to), 1) << text;
    return IsLoopbackAddress(address);
  };
  for (const char* const local : {"127.0.0.1", "127.1.2.3"}) {
    EXPECT_TRUE(is_loopback(AF_INET, local)) << local;
  }
  for (const char* const local : {"::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(is_loopback(AF_INET6, local)) << local;
  }
  for (const char* const remote : {"10.0.0.1", "128.0.0.1", "12.7.0.1"}) {
    EXPECT_FALSE(is_loopback(AF_INET, remote)) << remote;
  }
  for (const char* const remote : {"::12", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1"}) {
    EXPECT_FALSE(is_loopback(AF_INET6, remote)) << remote;
  }
}

TEST(PeerOfTest, MappedAddressesAreIpv4) {
  const Result<TcpListeners> any = ListenTcp("0.0.0.0:0");
  ASSERT_TRUE(any.ok());
  const UniqueFd client = ConnectTo(any->port);
  pollfd polled{any->sockets[0].get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1);
  const UniqueFd accepted(accept(any->sockets[0].get(), nullptr, nullptr));
  EXPECT_EQ(PeerOf(accepted.get()), std::string("4\x7f\0\0\1", 5));
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd one(pair[0]), other(pair[1]);
  EXPECT_EQ(PeerOf(one.get()), "u" + std::to_string(geteuid()));
}

}  // namespace
}  // namespace attend
