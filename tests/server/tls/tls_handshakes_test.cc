// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_handshakes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <linux/sockios.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/support/tls_client.h"
#include "tests/server/support/transport_fixture.h"

namespace attend {
namespace {

using test::MakeSockets;
using test::MakeTlsContext;
using test::TlsClientEnd;

// A handshake of a peer, and its client's socket.
struct Begun {
  UniqueFd client;
  std::unique_ptr<TlsChannel> channel;  // once it is done
  std::atomic<bool> done{false};
  bool established = false;

  void Wait() { done.wait(false); }
};

class TlsHandshakesTest : public ::testing::Test {
 protected:
  void Start(Duration timeout = std::chrono::seconds(60)) {
    handshakes_ = *TlsHandshakes::Start(timeout, clock_);
  }
  // `then` is called on the thread once the handshake is done.
  std::unique_ptr<Begun> Begin(
      const std::string& peer, std::string_view said = "", std::function<void()> then = [] {}) {
    auto begun = std::make_unique<Begun>();
    auto [ours, theirs] = MakeSockets();
    begun->client = std::move(theirs);
    EXPECT_EQ(send(begun->client.get(), said.data(), said.size(), 0), std::ssize(said));
    handshakes_->Begin(
        peer, std::make_unique<TlsChannel>(std::move(ours), context_->get(), clock_),
        [raw = begun.get(), then](std::unique_ptr<TlsChannel> channel, bool established) {
          then();
          raw->channel = std::move(channel);
          raw->established = established;
          raw->done.store(true);
          raw->done.notify_all();
        });
    return begun;
  }

  const SteadyClock clock_{};
  const std::shared_ptr<const TlsContext> context_ = MakeTlsContext();
  std::unique_ptr<TlsHandshakes> handshakes_;
};

TEST_F(TlsHandshakesTest, HandsOverTheDataAfterTheHandshake) {
  Start();
  const auto begun = Begin("peer");
  TlsClientEnd client(std::move(begun->client));
  ASSERT_TRUE(client.Connect());
  ASSERT_TRUE(client.Send("words"));
  begun->Wait();
  EXPECT_TRUE(begun->established);
  std::vector<char> buffer(TlsChannel::kBufferBytesMin), scratch(TlsChannel::kBufferBytesMin);
  ssize_t bytes = -1;
  EXPECT_TRUE(Eventually([&] { return (bytes = begun->channel->Read(buffer, scratch)) >= 0; }));
  EXPECT_EQ(std::string_view(buffer.data(), static_cast<size_t>(bytes)), "words");
}

TEST_F(TlsHandshakesTest, ASilentClientTimesOut) {
  Start(std::chrono::milliseconds(10));
  for (const char* const said : {"", "\x16"}) {
    const auto begun = Begin("peer", said);
    begun->Wait();
    EXPECT_FALSE(begun->established);
    EXPECT_NE(begun->channel->wrong(), "");
    EXPECT_EQ(begun->channel->spoke(), *said != 0);
  }
}

TEST_F(TlsHandshakesTest, AClientThatLeavesIsNotAnError) {
  Start();
  const auto begun = Begin("peer");
  begun->client.Reset();
  begun->Wait();
  EXPECT_FALSE(begun->established);
  EXPECT_EQ(begun->channel->wrong(), "");
}

TEST_F(TlsHandshakesTest, DestructionFailsHandshakesInProgress) {
  Start();
  std::vector<std::unique_ptr<Begun>> all;
  for (const char* const peer : {"one", "one", "other"}) all.push_back(Begin(peer));
  handshakes_.reset();
  for (const auto& each : all) {
    EXPECT_TRUE(each->done.load());
    EXPECT_FALSE(each->established);
  }
}

// A hundred clients of one peer send data before the only client of another does.
TEST_F(TlsHandshakesTest, PeersTakeTurns) {
  Start();
  std::atomic<bool> all_begun{false};
  std::vector<char> order;  // used by the thread alone until all are done
  std::vector<std::unique_ptr<Begun>> begun;
  begun.push_back(Begin("first", "no TLS at all", [&] { all_begun.wait(false); }));
  for (int i = 0; i < 100; ++i) {
    begun.push_back(Begin("many", "no TLS at all", [&] { order.push_back('m'); }));
  }
  begun.push_back(Begin("few", "no TLS at all", [&] { order.push_back('f'); }));
  all_begun.store(true);
  all_begun.notify_all();
  for (const auto& each : begun) each->Wait();
  ASSERT_EQ(order.size(), 101u);
  // Some of the first peer's may have had turns before.
  EXPECT_LE(std::find(order.begin(), order.end(), 'f') - order.begin(), 10);
}

// It need not wait for its peer's turn.
TEST_F(TlsHandshakesTest, ADisconnectedClientTakesNoTurn) {
  Start();
  std::atomic<bool> waits{false}, goes_on{false};
  const auto first = Begin("first", "no TLS at all", [&] {
    waits.store(true);
    waits.notify_all();
    goes_on.wait(false);
  });
  waits.wait(false);
  const auto gone = Begin("second", "no TLS at all");
  gone->client.Reset();
  goes_on.store(true);
  goes_on.notify_all();
  gone->Wait();
  EXPECT_EQ(gone->channel->wrong(), "");  // a step would have set it
  first->Wait();
}

class TlsConnectionsTest : public TransportFixture {
 protected:
  // Serves a client with TLS; `ours`: a second descriptor of the server's end.
  std::unique_ptr<TlsClientEnd> ConnectTls(UniqueFd& ours) {
    if (transport_ == nullptr) Start();
    auto [socket, theirs] = MakeSockets();
    ours.Reset(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
    auto client = std::make_unique<TlsClientEnd>(std::move(theirs));
    auto channel = std::make_unique<TlsChannel>(std::move(socket), context_->get(), clock_);
    std::thread other([&] { EXPECT_TRUE(client->Connect()); });
    while (channel->Handshake() != TlsChannel::Step::kDone) {
      pollfd waiting{channel->socket(), POLLIN, 0};
      EXPECT_EQ(poll(&waiting, 1, 60000), 1);
    }
    other.join();
    transport_->Serve(std::move(channel), {.address = "test:1"}, nullptr);
    return client;
  }
  // The server has read everything that arrived.
  static bool WasRead(int ours) {
    return Eventually([&] {
      int bytes = -1;
      return ioctl(ours, SIOCINQ, &bytes) == 0 && bytes == 0;
    });
  }

  const std::shared_ptr<const TlsContext> context_ = MakeTlsContext();
};

// The answer to a key update request finds no room, and nothing else is to be sent.
TEST_F(TlsConnectionsTest, RecordsOfTlsItselfAreSentOnceTheSocketIsWritable) {
  UniqueFd ours;
  const auto tls = ConnectTls(ours);
  Http2Client client;
  const auto acknowledged = [&] {
    return std::count(client.frames().begin(), client.frames().end(), NGHTTP2_SETTINGS) == 2;
  };
  for (std::string output; !acknowledged();) {
    output = client.Output();
    if (!output.empty()) {
      ASSERT_TRUE(tls->Send(output));
    }
    const std::string frame = tls->Receive(9);
    ASSERT_EQ(frame.size(), 9u);
    const std::string rest = tls->Receive(static_cast<uint8_t>(frame[2]));  // short frames
    ASSERT_TRUE(client.Receive(frame + rest));
  }
  if (const std::string last = client.Output(); !last.empty()) {
    ASSERT_TRUE(tls->Send(last));
  }
  ASSERT_TRUE(WasRead(ours.get()));
  // Fills the socket with junk in its place.
  size_t junk = 0;
  const std::string zeros(4096, '\0');
  for (const size_t size : {zeros.size(), size_t{1}}) {
    for (ssize_t bytes; (bytes = send(ours.get(), zeros.data(), size, MSG_DONTWAIT)) > 0;) {
      junk += static_cast<size_t>(bytes);
    }
  }
  for (const int asks : {SSL_KEY_UPDATE_REQUESTED, SSL_KEY_UPDATE_NOT_REQUESTED}) {
    // Once the second request is read, the first has been served.
    ASSERT_EQ(SSL_key_update(tls->ssl(), asks), 1);
    ASSERT_EQ(SSL_do_handshake(tls->ssl()), 1);
    ASSERT_TRUE(WasRead(ours.get()));
  }
  for (std::string taken(4096, '\0'); junk > 0;) {
    const ssize_t bytes = recv(tls->socket(), taken.data(), std::min(junk, taken.size()), 0);
    ASSERT_GT(bytes, 0);
    junk -= static_cast<size_t>(bytes);
  }
  pollfd answered{tls->socket(), POLLIN, 0};
  EXPECT_EQ(poll(&answered, 1, 10000), 1);
}

}  // namespace
}  // namespace attend
