// SPDX-License-Identifier: Apache-2.0

#include "server/transport/http2_session.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <string>

#include "server/util/message.h"
#include "tests/server/support/http2_bytes.h"
#include "tests/server/support/http2_client.h"

namespace attend {
namespace {

// Keeps all events, and sends what the test chooses.
struct Recorded final : Http2Stream {
  void OnData(std::string_view bytes) override { came.append(bytes); }
  void OnEnd() override { ended = true; }
  void OnTaken(size_t bytes) override { taken += bytes; }
  void OnClose() override {
    closed = true;
    whole = trailers_sent;
  }
  void Write(std::string bytes) {
    const OutMessage message = OutMessage::Of(std::move(bytes));
    output.Refer(message.first.bytes, message.first.owner);
  }

  std::string came;
  RequestHead head;
  size_t taken = 0;
  bool ended = false, closed = false, whole = false;
};

CallMetadata Metadata(const CallMetadata::Entry& first, const CallMetadata::Entry& second = {}) {
  CallMetadata metadata;
  metadata.Add(first.first, first.second);
  if (!second.first.empty()) metadata.Add(second.first, second.second);
  return metadata;
}
const CallMetadata kHeaders = Metadata({":status", "200"}, {"content-type", "application/grpc"});
const CallMetadata kTrailers = Metadata({"grpc-status", "0"});

class Http2SessionTest : public ::testing::Test, protected Http2Session::Owner {
 protected:
  Http2Stream* OnRequest(int32_t id, RequestHead&& head) override {
    if (refuses_) return session().Reset(id, NGHTTP2_REFUSED_STREAM), nullptr;
    auto stream = std::make_unique<Recorded>();
    stream->head = std::move(head);
    return (streams_[id] = std::move(stream)).get();
  }
  Http2Session& session() {
    if (session_ == nullptr) {
      Http2Session::Owner& owner = *this;
      session_ = std::make_unique<Http2Session>(limits_, owner, clock_);
    }
    return *session_;
  }
  // Passes all output of the session to the client, `piece` bytes at a time.
  void ToClient(Http2Client& client) {
    for (;;) {
      ASSERT_TRUE(session().Send().ok());
      std::array<iovec, 1> first;
      if (session().output().Fill(first) == 0) return;
      const std::string_view bytes(static_cast<const char*>(first[0].iov_base), first[0].iov_len);
      ASSERT_TRUE(client.Receive(bytes));
      session().output().Consume(bytes.size());
    }
  }
  // Exchanges bytes until neither end has any. Returns the session's verdict on its client.
  Status Exchange(Http2Client& client, size_t piece = 1 << 20) {
    for (;;) {
      ToClient(client);
      const std::string said = client.Output();
      if (said.empty()) return Status();
      for (size_t at = 0; at < said.size(); at += piece) {
        const Status status = session().Receive(std::string_view(said).substr(at, piece));
        if (!status.ok()) return ToClient(client), status;
      }
    }
  }

  SteadyClock clock_;
  Http2Session::Limits limits_;
  std::map<int32_t, std::unique_ptr<Recorded>> streams_;
  bool refuses_ = false;
  std::unique_ptr<Http2Session> session_;
};

// A frame of this many zeros.
std::string Frame(uint8_t type, uint8_t flags, uint32_t id, size_t bytes) {
  return http2::Frame(type, flags, id, std::string(bytes, '\0'));
}

TEST_F(Http2SessionTest, AnswersARequest) {
  for (const size_t piece : {1, 3, 100000}) {
    session_.reset();
    Http2Client client;
    const int32_t id = client.Begin("/a.B/C", {{"x-bin", "AAE"}, {"grpc-timeout", "5S"}});
    client.SendMessage(id, "question");
    ASSERT_TRUE(Exchange(client, piece).ok());
    Recorded& stream = *streams_.at(id);
    EXPECT_EQ(stream.head.path, "/a.B/C");
    EXPECT_EQ(stream.head.method, "POST");
    EXPECT_EQ(stream.head.timeout, "5S");
    EXPECT_EQ(*stream.head.metadata.Find("x-bin"), std::string("\0\1", 2));
    EXPECT_EQ(stream.came, Framed("question"));
    EXPECT_TRUE(stream.ended);
    session().Respond(id, stream, kHeaders);
    stream.Write(Framed(std::string(100000, 'a')));
    session().End(id, stream, kTrailers);
    ASSERT_TRUE(Exchange(client).ok());
    EXPECT_EQ(client.answer(id).Messages(), std::vector<std::string>{std::string(100000, 'a')});
    EXPECT_EQ(client.answer(id).Status(), 0);
    EXPECT_EQ(client.answer(id).headers.at("content-type"), "application/grpc");
    EXPECT_TRUE(stream.closed && stream.whole);
    EXPECT_EQ(stream.taken, 100005u);
  }
}

TEST_F(Http2SessionTest, SendsAnAnswerInPieces) {
  Http2Client client;
  const int32_t id = client.Begin("/a.B/C", {}, /*ends=*/true);
  ASSERT_TRUE(Exchange(client).ok());
  Recorded& stream = *streams_.at(id);
  session().Respond(id, stream, kHeaders);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Exchange(client).ok());
    stream.Write(Framed("x"));
    session().Resume(id, stream);
    ASSERT_TRUE(Exchange(client).ok());
    EXPECT_EQ(client.answer(id).Messages().size(), size_t(i + 1));
  }
  session().End(id, stream, kTrailers);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.answer(id).Status(), 0);
}

TEST_F(Http2SessionTest, ResetsAStreamAfterItsTrailersIfTheClientIsNotDone) {
  Http2Client client;
  const int32_t id = client.Begin("/a.B/C");
  client.Send(id, Framed("first"));
  ASSERT_TRUE(Exchange(client).ok());
  session().RespondWhole(id, Metadata({":status", "200"}, {"grpc-status", "12"}));
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.answer(id).Status(), 12);
  EXPECT_TRUE(client.answer(id).ended);
  EXPECT_TRUE(client.answer(id).closed);
  EXPECT_EQ(client.answer(id).error, uint32_t{NGHTTP2_NO_ERROR});
  EXPECT_TRUE(streams_.at(id)->whole);
}

TEST_F(Http2SessionTest, ReportsAReset) {
  Http2Client client;
  const int32_t id = client.Begin("/a.B/C");
  ASSERT_TRUE(Exchange(client).ok());
  client.Reset(id);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_TRUE(streams_.at(id)->closed);
  EXPECT_FALSE(streams_.at(id)->whole);
}

TEST_F(Http2SessionTest, OpensWindowsAsDataIsConsumed) {
  limits_.stream_window_bytes = 100000;
  Http2Client client;
  const int32_t slow = client.Begin("/a.B/C");
  const int32_t other = client.Begin("/a.B/C");
  client.Send(slow, std::string(250000, 's'));
  ASSERT_TRUE(Exchange(client).ok());
  Recorded& stream = *streams_.at(slow);
  EXPECT_EQ(stream.came.size(), 100000u);
  client.Send(other, std::string(50000, 'o'));
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(streams_.at(other)->came.size(), 50000u);
  session().Consume(slow, 100000);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(stream.came.size(), 200000u);
  session().Consume(slow, 100000);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(stream.came.size(), 250000u);
}

TEST_F(Http2SessionTest, AcceptsPadding) {
  limits_.stream_window_bytes = 100000;
  Http2Client client;
  client.Pad(200);
  const int32_t id = client.Begin("/a.B/C");
  for (int i = 0; i < 1000; ++i) {
    client.Send(id, std::string(100, 'x'));
    ASSERT_TRUE(Exchange(client).ok());
    session().Consume(id, 100);
  }
  // More than the window, which padding fills as well.
  EXPECT_EQ(streams_.at(id)->came.size(), 100000u);
}

TEST_F(Http2SessionTest, StopsAtItsOutputBound) {
  limits_.output_bytes_max = 50000;
  Http2Client client;
  const int32_t id = client.Begin("/a.B/C", {}, true);
  ASSERT_TRUE(Exchange(client).ok());
  client.Grant(0, 1 << 28);
  client.Grant(id, 1 << 28);
  ASSERT_TRUE(Exchange(client).ok());
  Recorded& stream = *streams_.at(id);
  session().Respond(id, stream, kHeaders);
  for (int i = 0; i < 10; ++i) stream.Write(std::string(100000, 'a'));
  session().End(id, stream, kTrailers);
  ASSERT_TRUE(session().Send().ok());
  EXPECT_GE(session().output().size(), limits_.output_bytes_max);
  EXPECT_LE(session().output().size(), limits_.output_bytes_max + (1 << 15));
  EXPECT_TRUE(session().wants_send());
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.answer(id).body.size(), 1000000u);
}

TEST_F(Http2SessionTest, DrainsWhileServingStreamsOnTheirWay) {
  Http2Client client;
  const int32_t first = client.Begin("/a.B/C", {}, true);
  ASSERT_TRUE(Exchange(client).ok());
  session().Drain();
  const int32_t second = client.Begin("/a.B/C", {}, true);
  // The client opened it before it saw the drain.
  const std::string said = client.Output();
  ToClient(client);
  ASSERT_EQ(client.goaways().size(), 1u);
  EXPECT_EQ(client.goaways()[0].first, 0x7fffffff);
  ASSERT_TRUE(session().Receive(said).ok());
  ASSERT_TRUE(Exchange(client).ok());
  ASSERT_EQ(client.goaways().size(), 2u);
  EXPECT_EQ(client.goaways()[1].first, second);
  session().EndDrain();  // the drain timeout passes
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.goaways().size(), 2u);
  EXPECT_FALSE(session().over());
  for (const int32_t id : {first, second}) {
    session().RespondWhole(id, Metadata({":status", "200"}, {"grpc-status", "0"}));
  }
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.answer(second).Status(), 0);
  EXPECT_TRUE(session().over());
}

TEST_F(Http2SessionTest, AnnouncesTheStreamLimit) {
  limits_.streams_max = 3;
  Http2Client client;
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(client.streams_max(), 3u);
  for (int i = 0; i < 5; ++i) client.Begin("/a.B/C");
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(streams_.size(), 3u);
}

TEST_F(Http2SessionTest, RefusesStreamsBeyondTheLimitBeforeTheClientKnowsIt) {
  limits_.streams_max = 3;
  Http2Client client;
  int32_t last = 0;
  for (int i = 0; i < 5; ++i) last = client.Begin("/a.B/C");
  const std::string said = client.Output();
  ASSERT_TRUE(session().Receive(said).ok());
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(streams_.size(), 3u);
  EXPECT_EQ(client.answer(last).error, uint32_t{NGHTTP2_REFUSED_STREAM});
}

TEST_F(Http2SessionTest, EndsAConnectionThatNeverAcknowledgesTheSettings) {
  limits_.streams_max = 3;
  Http2Client client;
  std::string said = client.Output();
  Status status = session().Receive(said);
  for (int i = 0; i < 4 && status.ok(); ++i) {
    const int32_t id = client.Begin("/a.B/C", {}, true);
    status = session().Receive(client.Output());
    if (i < 3) session().RespondWhole(id, kHeaders);
    ASSERT_TRUE(session().Send().ok());
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
}

TEST_F(Http2SessionTest, ReportsAViolationOfHttp2) {
  Http2Client client;
  client.Begin("/a.B/C", {}, true);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_TRUE(session().wrong().ok());
  const std::string of_an_even_stream = Frame(NGHTTP2_DATA, 0, 2, 100);
  ASSERT_TRUE(session().Receive(of_an_even_stream).ok());
  ToClient(client);
  EXPECT_EQ(session().wrong().code(), Code::kInvalidArgument);
  EXPECT_TRUE(session().over() || session().wants_send());
}

TEST_F(Http2SessionTest, DropsDataOfRefusedStreams) {
  refuses_ = true;
  limits_.connection_window_bytes = 100000;
  Http2Client client;
  for (int i = 0; i < 10; ++i) client.Send(client.Begin("/a.B/C"), std::string(50000, 'x'), true);
  ASSERT_TRUE(Exchange(client).ok());
  refuses_ = false;
  const int32_t id = client.Begin("/a.B/C");
  client.Send(id, std::string(90000, 'x'), true);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_EQ(streams_.at(id)->came.size(), 90000u);
}

TEST_F(Http2SessionTest, BoundsTheMemoryOfHeaders) {
  limits_.header_list_bytes_max = 2000;
  Http2Client client;
  const int32_t id = client.Begin("/a.B/C", {{"long", std::string(3000, 'x')}}, true);
  const int32_t next = client.Begin("/a.B/C", {{"long", std::string(1000, 'x')}}, true);
  ASSERT_TRUE(Exchange(client).ok());
  EXPECT_TRUE(streams_.at(id)->head.too_large);
  EXPECT_EQ(streams_.at(id)->head.metadata.Find("long"), std::nullopt);
  EXPECT_FALSE(streams_.at(next)->head.too_large);
}

TEST_F(Http2SessionTest, EndsAConnectionOfEndlessHeaders) {
  limits_.header_list_bytes_max = 2000;
  Http2Client client;
  Http2Client::Headers many;
  // a byte each, once in the table
  for (int i = 0; i < 1000; ++i) many.emplace_back("same", "value");
  client.Begin("/a.B/C", many, true);
  const Status status = Exchange(client);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  ASSERT_EQ(client.goaways().size(), 1u);
  EXPECT_EQ(client.goaways()[0].second, uint32_t{NGHTTP2_ENHANCE_YOUR_CALM});
}

TEST_F(Http2SessionTest, EndsConnectionsThatFloodWithUselessFrames) {
  limits_.rates.resets = {.per_second = 1000, .burst = 1000};
  const std::map<std::string, std::string> floods = {
      {"ping", Frame(NGHTTP2_PING, 0, 0, 8)},
      {"ping's answer", Frame(NGHTTP2_PING, NGHTTP2_FLAG_ACK, 0, 8)},
      {"settings", Frame(NGHTTP2_SETTINGS, 0, 0, 0)},
      {"empty data", Frame(NGHTTP2_DATA, 0, 1, 0)},
      {"padding", Frame(NGHTTP2_DATA, NGHTTP2_FLAG_PADDED, 1, 1)},
      {"unknown", Frame(0x77, 0, 0, 0)},
      {"priority", Frame(NGHTTP2_PRIORITY, 0, 3, 5)},
      {"window", http2::WindowUpdate(0, 1)},
      {"continuation", http2::Continuation(3, "", 0)},
      {"ends of a call that was reset", Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, 1, 0)},
      {"resets of calls that never began", Frame(NGHTTP2_RST_STREAM, 0, 0x7fffffff, 4)},
  };
  for (const auto& [name, frame] : floods) {
    session_.reset();
    Http2Client client;
    const int32_t id = client.Begin("/a.B/C");
    ASSERT_TRUE(Exchange(client).ok());
    if (name.starts_with("ends")) client.Reset(id);
    ASSERT_TRUE(Exchange(client).ok());
    Status status;
    if (name == "continuation") status = session().Receive(http2::Headers(3, "", 0));
    int64_t count = 0;
    for (; status.ok() && count < 100000; ++count) {
      status = session().Receive(frame);
      if (name != "settings") ToClient(client);
    }
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << name;
    EXPECT_LT(count, 60000) << name;
    if (name == "settings") continue;  // not sent by this client, so it is told nothing more
    ASSERT_EQ(client.goaways().size(), 1u) << name;
    EXPECT_EQ(client.goaways()[0].second, uint32_t{NGHTTP2_ENHANCE_YOUR_CALM}) << name;
  }
}

TEST_F(Http2SessionTest, AllowsClientsToCancelManyCalls) {
  Http2Client client;
  for (int i = 0; i < 20; ++i) {
    std::vector<int32_t> ids;
    for (int call = 0; call < 500; ++call) ids.push_back(client.Begin("/a.B/C"));
    ASSERT_TRUE(Exchange(client).ok());
    for (const int32_t id : ids) client.Reset(id);
    ASSERT_TRUE(Exchange(client).ok());
  }
  EXPECT_EQ(streams_.size(), 10000u);
}

TEST_F(Http2SessionTest, RefusesOtherProtocols) {
  EXPECT_EQ(session().Receive("GET / HTTP/1.1\r\nhost: a\r\n\r\n").code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace attend
