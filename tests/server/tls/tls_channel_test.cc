// SPDX-License-Identifier: Apache-2.0

#include "server/transport/tls_channel.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <openssl/err.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/support/tls_client.h"

namespace attend {
namespace {

using test::MakeSockets;
using test::MakeTlsContext;
using test::TlsClientEnd;

constexpr size_t kBufferBytes = size_t{256} << 10;

std::string RandomBytes(size_t bytes) {
  std::independent_bits_engine<std::mt19937_64, 8, uint8_t> random(std::random_device{}());
  std::string text(bytes, '\0');
  for (char& each : text) each = static_cast<char>(random());
  return text;
}

class TlsChannelTest : public ::testing::Test {
 protected:
  void Open(int socket_bytes = 0, bool http2 = true) {
    auto [ours, theirs] = MakeSockets(socket_bytes);
    channel_ = std::make_unique<TlsChannel>(std::move(ours), context_->get(), clock_);
    client_ = std::make_unique<TlsClientEnd>(std::move(theirs), http2);
  }
  void Wait(int16_t events) const {
    pollfd waiting{channel_->socket(), events, 0};
    ASSERT_EQ(poll(&waiting, 1, 10000), 1);
  }
  TlsChannel::Step Shake() {
    for (;;) {
      const TlsChannel::Step step = channel_->Handshake();
      if (step == TlsChannel::Step::kDone || step == TlsChannel::Step::kFailed) return step;
      Wait(step == TlsChannel::Step::kWantsRead ? POLLIN : POLLOUT);
    }
  }
  // Connects the client, which then sends `first`.
  void Connect(const std::string& first = "", int socket_bytes = 0,
               int version_max = TLS1_3_VERSION) {
    Open(socket_bytes);
    SSL_set_max_proto_version(client_->ssl(), version_max);
    std::thread other([&] {
      ASSERT_TRUE(client_->Connect());
      if (!first.empty()) {
        ASSERT_TRUE(client_->Send(first));
      }
    });
    EXPECT_EQ(Shake(), TlsChannel::Step::kDone);
    other.join();
  }
  // Reads until this many bytes have come, or the end.
  std::string Receive(size_t bytes) {
    std::string got;
    while (got.size() < bytes) {
      const ssize_t more = channel_->Read(buffer_, scratch_);
      if (more > 0) got.append(buffer_.data(), static_cast<size_t>(more));
      if (more == 0 || (more < 0 && errno != EAGAIN)) break;
      if (more < 0) Wait(POLLIN);
    }
    return got;
  }
  void Send(OutputQueue& output) {
    while (!output.empty()) {
      const ssize_t bytes = channel_->Write(output, scratch_);
      if (bytes >= 0) {
        output.Consume(static_cast<size_t>(bytes));
        continue;
      }
      ASSERT_EQ(errno, EAGAIN);
      Wait(POLLOUT);
    }
  }

  const SteadyClock clock_{};
  const std::shared_ptr<const TlsContext> context_ = MakeTlsContext();
  std::vector<char> buffer_ = std::vector<char>(kBufferBytes);
  std::vector<char> scratch_ = std::vector<char>(kBufferBytes);
  std::unique_ptr<TlsChannel> channel_;
  std::unique_ptr<TlsClientEnd> client_;
};

// A client may send its first data together with the end of its handshake.
TEST_F(TlsChannelTest, DataRightAfterTheHandshakeIsNotLost) {
  Connect("first words");
  EXPECT_EQ(Receive(11), "first words");
}

TEST_F(TlsChannelTest, ManyRecordsOfOneReadAreReadAtOnce) {
  Connect();
  const std::string sent = RandomBytes(100000);
  std::thread other([&] { ASSERT_TRUE(client_->Send(sent)); });
  EXPECT_EQ(Receive(sent.size()), sent);
  other.join();
  EXPECT_EQ(channel_->Read(buffer_, scratch_), -1);
  EXPECT_EQ(errno, EAGAIN);
}

// A socket with small buffers delivers and accepts parts of records.
TEST_F(TlsChannelTest, PartialRecordsAreReassembled) {
  Connect("", 4608);
  const std::string there = RandomBytes(700000), back = RandomBytes(900000);
  std::string got;
  std::thread other([&] {
    ASSERT_TRUE(client_->Send(there));
    got = client_->Receive(back.size());
  });
  EXPECT_EQ(Receive(there.size()), there);
  OutputQueue output;
  const auto owner = std::make_shared<const std::string>(back);
  // Small pieces, and some that are larger than a record.
  std::mt19937 random(std::random_device{}());
  for (size_t at = 0; at < back.size();) {
    const size_t most = std::min<size_t>(back.size() - at, at % 3 == 0 ? 50000 : 30);
    const size_t bytes = std::uniform_int_distribution<size_t>(1, most)(random);
    output.Refer(std::string_view(*owner).substr(at, bytes), owner);
    at += bytes;
  }
  Send(output);
  other.join();
  EXPECT_EQ(got, back);
}

// The caller may add to the output while its front waits for the socket.
TEST_F(TlsChannelTest, OutputAddedWhileRecordsWaitKeepsItsOrder) {
  Connect("", 4608);
  const std::string first = RandomBytes(200000), second = RandomBytes(200000);
  OutputQueue output;
  output.Copy(first);
  size_t gone = 0;
  for (ssize_t bytes = 0; (bytes = channel_->Write(output, scratch_)) >= 0;) {
    output.Consume(static_cast<size_t>(bytes));
    gone += static_cast<size_t>(bytes);
  }
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_LT(gone, first.size());
  output.Copy(second);
  std::string got;
  std::thread other([&] { got = client_->Receive(first.size() + second.size()); });
  Send(output);
  other.join();
  EXPECT_TRUE(got == first + second);
}

// Records of an answer may be blocked while the client keeps sending.
TEST_F(TlsChannelTest, ABlockedWriteDoesNotStopReading) {
  Connect();
  OutputQueue output;
  output.Copy(RandomBytes(8 << 20));
  for (ssize_t bytes = 0; (bytes = channel_->Write(output, scratch_)) >= 0;) {
    output.Consume(static_cast<size_t>(bytes));
  }
  ASSERT_EQ(errno, EAGAIN);
  ASSERT_TRUE(client_->Send("more"));
  EXPECT_EQ(Receive(4), "more");
  EXPECT_EQ(channel_->wrong(), "");
}

TEST_F(TlsChannelTest, ARefusedClientGetsTheAlert) {
  Open(0, /*http2=*/false);
  bool connected = true;
  std::thread other([&] {
    connected = client_->Connect();
    ERR_print_errors_cb([](const char*, size_t, void*) { return 1; }, nullptr);
  });
  EXPECT_EQ(Shake(), TlsChannel::Step::kFailed);
  channel_->End();
  other.join();
  EXPECT_FALSE(connected);
  EXPECT_EQ(channel_->wrong(), "no application protocol");
}

TEST_F(TlsChannelTest, TooManyKeyUpdatesEndTheConnection) {
  for (const int asks : {SSL_KEY_UPDATE_NOT_REQUESTED, SSL_KEY_UPDATE_REQUESTED}) {
    Connect();
    for (int i = 0; i < 40; ++i) {
      ASSERT_EQ(SSL_key_update(client_->ssl(), asks), 1);
      if (!client_->Send("x")) break;
    }
    EXPECT_LT(Receive(40).size(), 40u);
    EXPECT_EQ(channel_->wrong(), "too many TLS handshake messages");
  }
}

TEST_F(TlsChannelTest, ARenegotiationIsRefused) {
  Connect("", 0, TLS1_2_VERSION);
  std::thread other([&] {
    EXPECT_EQ(SSL_renegotiate(client_->ssl()), 1);
    EXPECT_NE(SSL_do_handshake(client_->ssl()), 1);
    EXPECT_EQ(ERR_GET_REASON(ERR_get_error()), SSL_R_NO_RENEGOTIATION);
    ERR_clear_error();
    shutdown(client_->socket(), SHUT_WR);
  });
  EXPECT_EQ(Receive(1), "");
  other.join();
}

// OpenSSL's client gives up at the first refusal; other clients need not.
TEST_F(TlsChannelTest, TooManyRenegotiationsEndTheConnection) {
  Connect("", 0, TLS1_2_VERSION);
  test::Tls12Writer records(*client_);
  for (int i = 0; i < 3; ++i) records.Send(SSL3_RT_HANDSHAKE, test::kEmptyClientHello);
  records.Send(SSL3_RT_APPLICATION_DATA, "words");
  EXPECT_EQ(Receive(5), "words");  // a few are only refused
  for (int i = 0; i < 40; ++i) records.Send(SSL3_RT_HANDSHAKE, test::kEmptyClientHello);
  EXPECT_EQ(Receive(1), "");
  EXPECT_EQ(channel_->wrong(), "too many TLS handshake messages");
}

TEST_F(TlsChannelTest, AFewKeyUpdatesAreAccepted) {
  Connect();
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(SSL_key_update(client_->ssl(), SSL_KEY_UPDATE_REQUESTED), 1);
    ASSERT_TRUE(client_->Send("x"));
  }
  EXPECT_EQ(Receive(3), "xxx");
  OutputQueue output;
  output.Copy("answer");
  Send(output);
  EXPECT_EQ(client_->Receive(6), "answer");
}

TEST_F(TlsChannelTest, UnencryptedBytesEndTheConnection) {
  Connect();
  ASSERT_EQ(send(client_->socket(), "plain words here", 16, 0), 16);
  Wait(POLLIN);
  EXPECT_EQ(channel_->Read(buffer_, scratch_), -1);
  EXPECT_NE(errno, EAGAIN);
}

TEST_F(TlsChannelTest, BothEndsSendCloseNotify) {
  Connect();
  channel_->End();
  EXPECT_EQ(client_->Receive(1), "");
  EXPECT_EQ(SSL_get_shutdown(client_->ssl()), SSL_RECEIVED_SHUTDOWN);
  SSL_shutdown(client_->ssl());
  Wait(POLLIN);
  EXPECT_EQ(channel_->Read(buffer_, scratch_), 0);
}

TEST_F(TlsChannelTest, NothingIsReadFromARevokedClient) {
  Connect("secret");
  channel_->SetTrustCheck([] { return false; });
  Wait(POLLIN);
  EXPECT_EQ(channel_->Read(buffer_, scratch_), -1);
  EXPECT_NE(errno, EAGAIN);
}

}  // namespace
}  // namespace attend
