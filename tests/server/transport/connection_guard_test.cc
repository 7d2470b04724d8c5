// SPDX-License-Identifier: Apache-2.0
//
// A connection's guard: the counts and ends that it is told of.

#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "tests/server/support/transport_fixture.h"

namespace attend {
namespace {

using ConnectionGuardTest = TransportFixture;

TEST_F(ConnectionGuardTest, AsksItsGuardBeforeACall) {
  const auto shared = std::make_shared<CountingGuard::Counts>();
  const CountingGuard::Counts& counts = *shared;
  ConnectedClient client = Connect(std::make_unique<CountingGuard>(shared, 3));
  const int32_t held = client->Begin("/held");
  client->SendMessage(held, std::string(1000, 'h'), false);
  const int32_t whole = client->Begin("/echo");
  client->SendMessage(whole, "w");
  ASSERT_TRUE(client.UntilClosed(whole));
  EXPECT_TRUE(Eventually([&] { return counts.bytes.load() == 1005 + 6; }));
  EXPECT_EQ(counts.open.load(), 1);
  EXPECT_EQ(counts.spoke.load(), 1);
  for (int i = 0; i < 3; ++i) client->Begin("/held");
  EXPECT_TRUE(client.Until([&] { return client.ended; }));
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(counts.open.load(), 0);
  EXPECT_EQ(counts.ended.load(), 1);
  EXPECT_EQ(counts.failed.load(), 1);
}

TEST_F(ConnectionGuardTest, ClosesSilentConnections) {
  options_.connection.handshake_timeout = std::chrono::milliseconds(10);
  const auto shared = std::make_shared<CountingGuard::Counts>();
  int64_t silent = 0;
  for (const size_t bytes : {0, 10, NGHTTP2_CLIENT_MAGIC_LEN}) {
    ConnectedClient client = Connect(std::make_unique<CountingGuard>(shared, 3));
    const std::string output = client.client->Output();
    EXPECT_EQ(send(client.socket.get(), output.data(), bytes, 0), static_cast<ssize_t>(bytes));
    ++silent;
    EXPECT_TRUE(Eventually([&] { return shared->silent.load() == silent; })) << bytes;
  }
  EXPECT_EQ(shared->spoke.load(), 0);
}

TEST_F(ConnectionGuardTest, EndsConnectionsWhoseMessagesStall) {
  options_.connection.message_timeout = std::chrono::milliseconds(50);
  const auto shared = std::make_shared<CountingGuard::Counts>();
  const auto connect = [&] { return Connect(std::make_unique<CountingGuard>(shared, 9)); };
  ConnectedClient asked = connect(), idle = connect(), unasked = connect();
  const int32_t echo = idle->Begin("/echo");
  idle->SendMessage(echo, "a whole one", false);
  ASSERT_TRUE(idle.Until([&] { return idle->answer(echo).Messages().size() == 1; }));
  unasked->Send(unasked->Begin("/held"), std::string(3, '\0'));
  unasked.Write();
  for (const size_t bytes : {1, 2, 100}) {
    asked->SendMessage(asked->Begin("/echo"), "a whole one");
    asked->Send(asked->Begin("/echo"), std::string("\0\0\0\1\0", 5) + std::string(bytes, 'x'));
    EXPECT_TRUE(asked.Until([&] { return asked.ended; })) << bytes;
    asked = connect();
  }
  EXPECT_TRUE(Eventually([&] { return shared->stalled.load() == 3; }));
  EXPECT_FALSE(idle.ended) << "between messages";
  idle->SendMessage(echo, "and another");
  ASSERT_TRUE(idle.UntilClosed(echo));
  EXPECT_EQ(idle->answer(echo).Messages().size(), 2u);
  EXPECT_EQ(shared->ended.load(), 3) << "what the server does not ask for is not late";
}

// Its output is full, so the server does not read it.
TEST_F(ConnectionGuardTest, AMessageStallsIfItsClientTakesNothing) {
  options_.connection.message_timeout = std::chrono::milliseconds(50);
  const auto shared = std::make_shared<CountingGuard::Counts>();
  ConnectedClient client = Connect(std::make_unique<CountingGuard>(shared, 99));
  client->Grant(0, 1 << 30);
  for (int i = 0; i < 40; ++i) client->Grant(client->Begin("/flood"), 1 << 30);
  client->Send(client->Begin("/echo"), std::string("\0\0\0\1\0x", 6));
  client.Write();
  EXPECT_TRUE(Eventually([&] { return shared->stalled.load() == 1; }));
}

TEST_F(ConnectionGuardTest, TellsItsGuardHowManyBytesAreKept) {
  const auto shared = std::make_shared<CountingGuard::Counts>();
  const CountingGuard::Counts& counts = *shared;
  ConnectedClient client = Connect(std::make_unique<CountingGuard>(shared, 3));
  for (const bool reset : {true, false}) {
    const int32_t held = client->Begin("/held");
    client->SendMessage(held, std::string(1000, 'h'), false);
    client->SendMessage(held, std::string(2000, 'h'), false);
    const int32_t read = client->Begin("/echo");
    client->SendMessage(read, std::string(500, 'r'), false);
    client->SendMessage(read, std::string(500, 'r'));
    ASSERT_TRUE(client.UntilClosed(read));
    EXPECT_TRUE(Eventually([&] { return counts.kept.load() == 3010; })) << counts.kept.load();
    if (!reset) break;
    client->Reset(held);
    EXPECT_TRUE(client.Until([&] { return counts.kept.load() == 0; })) << counts.kept.load();
  }
  client.socket.Reset();
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(counts.kept.load(), 0);
}

}  // namespace
}  // namespace attend
