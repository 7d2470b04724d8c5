// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "server/transport/metadata.h"
#include "tests/server/support/transport_fixture.h"

namespace attend {
namespace {

class CallsTest : public TransportFixture {};

TEST_F(CallsTest, AnswerAUnaryCall) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo", {{"say-bin", EncodeBase64("a\n")}});
  client->SendMessage(id, "hello");
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Messages(), std::vector<std::string>{"hello"});
  EXPECT_EQ(client->answer(id).Status(), 0);
  EXPECT_EQ(client->answer(id).headers.at("said-bin"), EncodeBase64("a\n"));
  EXPECT_EQ(client->answer(id).trailers.at("grpc-status-details-bin"),
            EncodeBase64(std::string("\0details", 8)));
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(methods_.counts.cancelled.load(), 0);
}

TEST_F(CallsTest, AnswerFromAnotherThread) {
  ConnectedClient client = Connect();
  std::vector<int32_t> ids;
  for (int i = 0; i < 100; ++i) {
    ids.push_back(client->Begin("/later"));
    client->SendMessage(ids.back(), std::string(1000 * i, 'x'));
  }
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(client.UntilClosed(ids[i]));
    EXPECT_EQ(client->answer(ids[i]).Messages(),
              std::vector<std::string>{std::string(1000 * i, 'x')});
  }
  EXPECT_TRUE(AllDone());
}

TEST_F(CallsTest, StreamBothWays) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo");
  for (size_t i = 0; i < 50; ++i) {
    client->SendMessage(id, std::to_string(i), false);
    if (i % 3 != 0) continue;
    ASSERT_TRUE(client.Until([&] { return client->answer(id).Messages().size() == i + 1; }));
    EXPECT_EQ(client->answer(id).Messages().back(), std::to_string(i));
  }
  client->Send(id, "", true);
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Messages().size(), 50u);
  EXPECT_EQ(client->answer(id).Status(), 0);
  EXPECT_EQ(methods_.counts.half_closed.load(), 1);
}

TEST_F(CallsTest, ReadByteByByte) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo");
  client->SendMessage(id, "slowly", false);
  client->SendMessage(id, "", true);
  const std::string said = client->Output();
  for (const char byte : said) {
    ASSERT_EQ(send(client.socket.get(), &byte, 1, 0), 1);
    std::this_thread::yield();
  }
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Messages(), (std::vector<std::string>{"slowly", ""}));
}

TEST_F(CallsTest, TakeMessagesLargerThanTheirWindow) {
  options_.connection.session.stream_window_bytes = 65536;
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo");
  const std::string large(1 << 20, 'l');
  client->SendMessage(id, large);
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Messages(), std::vector<std::string>{large});
}

TEST_F(CallsTest, RefuseAMessageThatIsTooLongOrCompressed) {
  ConnectedClient client = Connect();
  const int32_t large = client->Begin("/echo");
  client->SendMessage(large, std::string((1 << 20) + 1, 'l'));
  ASSERT_TRUE(client.UntilClosed(large));
  EXPECT_EQ(client->answer(large).Status(), static_cast<int>(Code::kResourceExhausted));
  EXPECT_EQ(client->answer(large).Message(),
            "a message has 1048577 bytes, must have at most 1048576 (by a test)");
  const int32_t compressed = client->Begin("/echo", {{"grpc-encoding", "gzip"}});
  client->Send(compressed, Framed("x", true), true);
  ASSERT_TRUE(client.UntilClosed(compressed));
  EXPECT_EQ(client->answer(compressed).Status(), static_cast<int>(Code::kUnimplemented));
  EXPECT_TRUE(AllDone());
}

TEST_F(CallsTest, RefuseAMessageThatIsCutOff) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo");
  client->Send(id, Framed("whole").substr(0, 7), true);
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Status(), static_cast<int>(Code::kInvalidArgument));
  EXPECT_TRUE(AllDone());
}

TEST_F(CallsTest, EndBeforeTheirClientIsDone) {
  ConnectedClient client = Connect();
  const int32_t refused = client->Begin("/refused");
  ASSERT_TRUE(client.UntilClosed(refused));
  EXPECT_EQ(client->answer(refused).Status(), static_cast<int>(Code::kPermissionDenied));
  EXPECT_EQ(client->answer(refused).Message(), "not %C3%A9 you");
  EXPECT_EQ(client->answer(refused).error, uint32_t{NGHTTP2_NO_ERROR});
  const int32_t deaf = client->Begin("/deaf");
  client->SendMessage(deaf, std::string(100000, 'd'), false);
  client->SendMessage(deaf, std::string(100000, 'd'), false);
  ASSERT_TRUE(client.UntilClosed(deaf));
  EXPECT_EQ(client->answer(deaf).Status(), static_cast<int>(Code::kOutOfRange));
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(methods_.counts.cancelled.load(), 0);
}

TEST_F(CallsTest, EndAtTheirDeadline) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/held", {{"grpc-timeout", "20m"}});
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Status(), static_cast<int>(Code::kDeadlineExceeded));
  const int32_t past = client->Begin("/held", {{"grpc-timeout", "0n"}});
  ASSERT_TRUE(client.UntilClosed(past));
  // Not for the lack of a message, which is still arriving.
  const int32_t slow = client->Begin("/one", {{"grpc-timeout", "20m"}});
  client->Send(slow, Framed("whole").substr(0, 7), false);
  ASSERT_TRUE(client.UntilClosed(slow));
  EXPECT_EQ(client->answer(slow).Status(), static_cast<int>(Code::kDeadlineExceeded));
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(methods_.counts.cancelled.load(), 3);
  for (const char* const timeout : {"1", "x", "123456789S", "-5S"}) {
    const int32_t wrong = client->Begin("/echo", {{"grpc-timeout", timeout}});
    ASSERT_TRUE(client.UntilClosed(wrong));
    EXPECT_EQ(client->answer(wrong).Status(), static_cast<int>(Code::kInvalidArgument));
  }
  EXPECT_EQ(methods_.counts.begun.load(), 3);
}

// The client resets its call after sending this much, and after reading this much.
TEST_F(CallsTest, CanBeCancelledInEveryState) {
  ConnectedClient client = Connect();
  for (const std::string path : {"/echo", "/later", "/held", "/deaf", "/refused", "/flood"}) {
    const bool answers = path == "/echo" || path == "/later" || path == "/flood";
    for (int state = 0; state < 6; ++state) {
      const int32_t id = client->Begin(path);
      client.Write();
      const auto sends = [&](std::string_view bytes, bool ends) {
        if (!client->answer(id).closed) client->Send(id, bytes, ends);
        client.Write();
      };
      if (state >= 1) sends(Framed("hello").substr(0, 3), false);
      if (state >= 2) sends(Framed("hello").substr(3), false);
      if (state >= 3) sends(Framed(std::string(70000, 'x')), false);
      if (state == 4 && answers) client.Until([&] { return !client->answer(id).body.empty(); });
      if (state >= 5) sends("", true);
      client->Reset(id);
      client.Write();
      const int32_t next = client->Begin("/echo");
      client->SendMessage(next, "still here");
      ASSERT_TRUE(client.UntilClosed(next));
      ASSERT_EQ(client->answer(next).Status(), 0);
    }
  }
  EXPECT_TRUE(AllDone());
}

// gRPC's clients send a lone reset for a call that is cancelled before its headers have left.
TEST_F(CallsTest, SurviveResetsOfCallsThatHaveNotBegun) {
  ConnectedClient client = Connect();
  const int32_t held = client->Begin("/echo");
  client->SendMessage(held, "begun before", false);
  ASSERT_TRUE(client.Until([&] { return client->answer(held).Messages().size() == 1; }));
  const std::string reset("\0\0\4\3\0\0\0\1\1\0\0\0\x08", 13);  // stream 257
  ASSERT_EQ(send(client.socket.get(), (reset + reset).data(), 26, 0), 26);
  client->SendMessage(held, "goes on");
  ASSERT_TRUE(client.UntilClosed(held));
  EXPECT_EQ(client->answer(held).Messages(), (std::vector<std::string>{"begun before", "goes on"}));
  EXPECT_EQ(client->answer(held).Status(), 0);
  EXPECT_TRUE(AllDone());
}

TEST_F(CallsTest, AreCancelledWhenTheConnectionEnds) {
  for (const char* const path : {"/echo", "/later", "/held", "/flood"}) {
    ConnectedClient client = Connect();
    for (int i = 0; i < 10; ++i) {
      client->SendMessage(client->Begin(path), std::string(10000, 'x'), i % 2 == 0);
    }
    client.Write();
    const int64_t begun = methods_.counts.begun.load();
    EXPECT_TRUE(Eventually([&] { return methods_.counts.begun.load() >= begun; }));
    client.socket.Reset();
    EXPECT_TRUE(Eventually([&] { return transport_->CountConnections() == 0; }));
    EXPECT_TRUE(AllDone());
  }
}

TEST_F(CallsTest, WaitForClientsThatDoNotRead) {
  ConnectedClient client = Connect();
  client.client = std::make_unique<Http2Client>(/*grants_windows=*/false);
  const int32_t id = client->Begin("/flood");
  ASSERT_TRUE(client.Until([&] { return client->answer(id).body.size() == 65535; }));
  // Another call of the same connection has its own window, but the connection's is full.
  client->Grant(0, 1000000);
  const int32_t other = client->Begin("/echo");
  client->SendMessage(other, "small");
  ASSERT_TRUE(client.UntilClosed(other));
  client->Grant(id, 100000);
  ASSERT_TRUE(client.Until([&] { return client->answer(id).body.size() == 165535; }));
  client->Reset(id);
  client.Write();
  EXPECT_TRUE(AllDone());
}

TEST_F(CallsTest, AreCancelledIfTheirAnswersAreNotRead) {
  options_.connection.write_timeout = std::chrono::milliseconds(50);
  std::atomic<int64_t> unread{0};
  options_.connection.on_unread = [&](const std::string& peer) {
    EXPECT_EQ(peer, "test:1");
    unread.fetch_add(1);
  };
  ConnectedClient reads = Connect(), deaf = Connect();
  const int32_t big = reads->Begin("/big");
  reads->SendMessage(big, "x");
  ASSERT_TRUE(reads.UntilClosed(big));
  EXPECT_EQ(unread.load(), 0);
  deaf->SendMessage(deaf->Begin("/flood"), "x", false);
  deaf.Write();  // and reads nothing
  EXPECT_TRUE(Eventually([&] { return methods_.counts.cancelled.load() == 1; }));
  EXPECT_GE(unread.load(), 1);
  EXPECT_TRUE(AllDone());
  const int32_t again = reads->Begin("/echo");
  reads->SendMessage(again, "x");
  ASSERT_TRUE(reads.UntilClosed(again));
  EXPECT_EQ(reads->answer(again).Status(), 0);
}

TEST_F(CallsTest, AreDoneOnceTheirAnswerIsInTheSocket) {
  ConnectedClient client = Connect();
  std::vector<int32_t> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(client->Begin("/big"));
    client->SendMessage(ids.back(), "?", false);
  }
  client.Write();
  client->Grant(0, 1 << 24);
  for (const int32_t id : ids) client->Grant(id, 1 << 24);
  client.Write();
  // For some of them, more than the socket accepts is in the connection's output.
  ASSERT_TRUE(Eventually([&] { return methods_.counts.messages.load() == 5; }));
  EXPECT_EQ(methods_.counts.done.load(), 0);
  for (const int32_t id : ids) ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(ids[4]).Messages()[0].size(), size_t{TestCall::kBigBytes});
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(methods_.counts.cancelled.load(), 0);
}

TEST_F(CallsTest, RefuseTooMuchOrMalformedMetadata) {
  ConnectedClient client = Connect();
  const int32_t large = client->Begin("/echo", {{"long", std::string(9000, 'x')}});
  ASSERT_TRUE(client.UntilClosed(large));
  EXPECT_EQ(client->answer(large).Status(), static_cast<int>(Code::kResourceExhausted));
  const int32_t wrong = client->Begin("/echo", {{"x-bin", "?"}});
  ASSERT_TRUE(client.UntilClosed(wrong));
  EXPECT_EQ(client->answer(wrong).Status(), static_cast<int>(Code::kInternal));
  EXPECT_EQ(methods_.counts.begun.load(), 0);
}

TEST_F(CallsTest, RefuseRequestsThatAreNotGrpc) {
  ConnectedClient client = Connect();
  const int32_t get = client->BeginAs(
      {{":method", "GET"}, {":scheme", "http"}, {":path", "/"}, {":authority", "a"}}, true);
  ASSERT_TRUE(client.UntilClosed(get));
  EXPECT_EQ(client->answer(get).headers.at(":status"), "405");
  const int32_t post = client->BeginAs({{":method", "POST"},
                                        {":scheme", "http"},
                                        {":path", "/echo"},
                                        {":authority", "a"},
                                        {"content-type", "text/html"}});
  ASSERT_TRUE(client.UntilClosed(post));
  EXPECT_EQ(client->answer(post).headers.at(":status"), "415");
  EXPECT_EQ(methods_.counts.begun.load(), 0);
}

}  // namespace
}  // namespace attend
