// SPDX-License-Identifier: Apache-2.0
//
// A connection that nobody would look at, as its descriptor is above those that ReadGuard has
// places for, is not gRPC's to read. Few systems let a process open so many, so this program has a
// ReadGuard of its own, in the library's place.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <string>

#include "server/net/read_guard.h"
#include "server/util/unique_fd.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

std::atomic<bool> has_place{false};

}  // namespace

bool ReadGuard::Begin(int, ino_t, const Http2Frames::Limits&, const Clock&, const OnWrong*) {
  return has_place;
}
void ReadGuard::BeginUnread(int, ino_t) {}
void ReadGuard::End(int) {}
void ReadGuard::WhileOpen(int, ino_t, const std::function<void()>&) {}

namespace {

TEST(NoPlaceTest, ConnectionsThatNobodyWouldLookAtAreClosedAndCounted) {
  test::TestServer server([](Config& config) { config.metrics_listen = "127.0.0.1:0"; });
  const std::string refused = R"(attend_connections_refused_total{reason="descriptors"})";
  EXPECT_EQ(server.Metric(refused), 0);
  const UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  const std::string& address = server.address();
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  ASSERT_EQ(send(client.get(), "P", 1, MSG_NOSIGNAL), 1);  // until then gRPC is not asked
  pollfd polled{client.get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1);
  char byte;
  EXPECT_LE(recv(client.get(), &byte, 1, MSG_DONTWAIT), 0) << "gRPC has answered";
  EXPECT_EQ(server.Metric(refused), 1);

  has_place = true;
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  const grpc::Status status = server.Stub()->GetServerInfo(&context, {}, &info);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.Metric(refused), 1);
}

}  // namespace
}  // namespace attend
