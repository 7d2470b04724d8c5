// SPDX-License-Identifier: Apache-2.0
//
// Large messages whose tensors are received in their final place: the memory held for them and for
// how long, and that they are answered like others.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"
#include "tests/server/support/transport_fixture.h"

namespace attend {
namespace {

using test::TestServer;
using test::WireProblem;

constexpr std::string_view kAttend = "/attend.v1.AttentionService/Attend";
constexpr int64_t kTensorBytes = 3 * 2 * 96 * 256 * 4;  // 576 KiB

WireProblem Large(uint64_t seed) { return test::PlainWireProblem(seed, 96, 256); }

class EarlyInputSystemTest : public ::testing::Test {
 protected:
  ConnectedClient Connect() {
    ConnectedClient client;
    client.socket.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const std::string& address = server_->address();
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    EXPECT_EQ(connect(client.socket.get(), reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    return client;
  }
  // Sends half of the message.
  int32_t SendHalf(ConnectedClient& client, const WireProblem& problem) {
    const int32_t id = client->Begin(kAttend);
    const std::string framed = Framed(problem.request.SerializeAsString());
    client->Send(id, std::string_view(framed).substr(0, framed.size() / 2));
    client.Write();
    return id;
  }
  void SendRest(ConnectedClient& client, int32_t id, WireProblem problem) {
    const std::string framed = Framed(problem.request.SerializeAsString());
    client->Send(id, std::string_view(framed).substr(framed.size() / 2), /*ends=*/true);
    ASSERT_TRUE(client.UntilClosed(id));
    ASSERT_EQ(client->answer(id).Status(), 0) << client->answer(id).Message();
    v1::AttendResponse response;
    ASSERT_TRUE(response.ParseFromString(client->answer(id).Messages().at(0)));
    EXPECT_EQ(test::Judge(problem, response), "");
  }
  int64_t Used() { return server_->server().engine().host_pool().used_bytes(); }
  bool NothingHeld() {
    return Eventually([&] { return Used() == 0; });
  }

  std::optional<TestServer> server_;
};

TEST_F(EarlyInputSystemTest, AnIncompleteMessageHoldsItsTensorsMemory) {
  server_.emplace();
  ConnectedClient client = Connect();
  const WireProblem problem = Large(1);
  const int32_t id = SendHalf(client, problem);
  EXPECT_TRUE(Eventually([&] { return Used() >= kTensorBytes; }));
  EXPECT_EQ(server_->server().engine().inflight(), 0);
  SendRest(client, id, Large(1));
  EXPECT_TRUE(NothingHeld());
}

TEST_F(EarlyInputSystemTest, AnAbandonedMessageFreesItsMemory) {
  server_.emplace();
  for (const bool reset : {true, false}) {
    ConnectedClient client = Connect();
    const int32_t id = SendHalf(client, Large(2));
    EXPECT_TRUE(Eventually([&] { return Used() >= kTensorBytes; }));
    if (reset) {
      client->Reset(id);
      client.Write();
    } else {
      client.socket.Reset();
    }
    EXPECT_TRUE(NothingHeld());
  }
  ConnectedClient client = Connect();
  const int32_t late = client->Begin(kAttend, {{"grpc-timeout", "300m"}});
  const std::string framed = Framed(Large(3).request.SerializeAsString());
  client->Send(late, std::string_view(framed).substr(0, framed.size() / 2));
  EXPECT_TRUE(client.UntilClosed(late));
  EXPECT_TRUE(NothingHeld());
}

TEST_F(EarlyInputSystemTest, AServerCanEndDuringAMessage) {
  server_.emplace();
  ConnectedClient client = Connect();
  SendHalf(client, Large(4));
  EXPECT_TRUE(Eventually([&] { return Used() >= kTensorBytes; }));
  server_.reset();
}

TEST_F(EarlyInputSystemTest, IncompleteMessagesHoldAtMostAnEighthOfTheMemory) {
  server_.emplace([](Config& config) { config.memory_budget_bytes = 16 << 20; });
  std::vector<ConnectedClient> clients;
  std::vector<int32_t> ids;
  const WireProblem problem = Large(5);
  for (int i = 0; i < 6; ++i) {
    clients.push_back(Connect());
    ids.push_back(SendHalf(clients.back(), problem));
  }
  EXPECT_TRUE(Eventually([&] { return Used() >= kTensorBytes; }));
  // Others are served meanwhile.
  ConnectedClient other = Connect();
  SendRest(other, SendHalf(other, Large(6)), Large(6));
  EXPECT_TRUE(Eventually([&] { return Used() < 2 << 20; }));
  for (size_t i = 0; i < clients.size(); ++i) SendRest(clients[i], ids[i], Large(5));
  EXPECT_TRUE(NothingHeld());
}

// Messages of several calls of a connection interleave, in frames of any size.
TEST_F(EarlyInputSystemTest, InterleavedMessagesInFramesOfAnySizeAreAnswered) {
  server_.emplace();
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 3; ++round) {
    ConnectedClient client = Connect();
    if (round == 1) client->Pad(37);
    struct Sent {
      int32_t id;
      WireProblem problem;
      std::string bytes;
      size_t at = 0;
    };
    std::vector<Sent> calls;
    for (int i = 0; i < 4; ++i) {
      WireProblem problem = i == 3 ? test::PlainWireProblem(seed + i) : Large(seed + i);
      std::string message = problem.request.SerializeAsString();
      if (i == 2) message = test::Shuffled(message, random);
      calls.push_back({client->Begin(kAttend), std::move(problem), Framed(message)});
    }
    for (size_t open = calls.size(); open > 0;) {
      Sent& call = calls[random() % calls.size()];
      if (call.at == call.bytes.size()) continue;
      const size_t piece = 1 + random() % (random() % 2 == 0 ? 300 : 400000);
      const std::string_view bytes = std::string_view(call.bytes).substr(call.at, piece);
      call.at += bytes.size();
      const bool ends = call.at == call.bytes.size();
      open -= ends ? 1 : 0;
      client->Send(call.id, bytes, ends);
      if (random() % 4 == 0) client.Write();
    }
    for (Sent& call : calls) {
      ASSERT_TRUE(client.UntilClosed(call.id));
      v1::AttendResponse response;
      ASSERT_EQ(client->answer(call.id).Status(), 0) << client->answer(call.id).Message();
      ASSERT_TRUE(response.ParseFromString(client->answer(call.id).Messages().at(0)));
      EXPECT_EQ(test::Judge(call.problem, response), "");
    }
  }
  EXPECT_TRUE(NothingHeld());
}

}  // namespace
}  // namespace attend
