// SPDX-License-Identifier: Apache-2.0

#include "server/net/http2_frames.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "server/net/read_guard.h"
#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::seconds;

constexpr uint8_t kData = 0, kHeaders = 1, kPriority = 2, kReset = 3, kSettings = 4,
                  kWindowUpdate = 8, kContinuation = 9, kUnknown = 77;
constexpr uint8_t kAck = 1, kEndStream = 1, kEndHeaders = 4;

// The same frame on that stream.
std::string On(uint32_t stream, std::string frame) {
  for (int i = 0; i < 4; ++i) frame[5 + i] = static_cast<char>(stream >> (24 - 8 * i));
  return frame;
}

// On the next one.
std::string Next(std::string frame) {
  static uint32_t stream = 1;
  return On(stream += 2, std::move(frame));
}

std::string Frame(uint8_t type, uint8_t flags, size_t bytes) {
  std::string frame = {static_cast<char>(bytes >> 16),
                       static_cast<char>(bytes >> 8),
                       static_cast<char>(bytes),
                       static_cast<char>(type),
                       static_cast<char>(flags),
                       0,
                       0,
                       0,
                       1};
  frame += std::string(bytes, '\1');  // which would be a head that is wrong
  return type == kHeaders ? Next(frame) : frame;
}

class Http2FramesTest : public ::testing::Test {
 protected:
  Http2FramesTest() { Restart(); }
  // Another connection, after its preface: none is read any further once it was wrong.
  void Restart() {
    frames_.emplace(Http2Frames::Limits{.streams = 5, .heap = heap_, .calls = peer_});
    Read(std::string(24, 'P'));
  }
  std::string Read(const std::string& bytes) {
    const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
    const char* const wrong = frames_->Read({data, bytes.size()}, now_);
    return wrong == nullptr ? "" : wrong;
  }
  // The first of so many such frames that is wrong; 0: none.
  int64_t FirstWrong(const std::string& frame, int64_t count) {
    for (int64_t i = 1; i <= count; ++i) {
      if (!Read(frame[3] == kHeaders ? Next(frame) : frame).empty()) return i;
    }
    return 0;
  }

  void Write(const std::string& bytes) {
    frames_->Written({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
  }

  TimePoint now_ = TimePoint() + seconds(1000);
  int64_t heap_bytes_ = 0;
  const test::ManualClock clock_;
  std::shared_ptr<HeapPressure> heap_ =
      std::make_shared<HeapPressure>(100, 0, clock_, [this] { return heap_bytes_; });
  std::shared_ptr<OpenCalls> open_ = std::make_shared<OpenCalls>(1'000'000, 1'000'000);
  std::shared_ptr<OpenCalls::Peer> peer_ = open_->Of("peer");
  std::optional<Http2Frames> frames_;
};

TEST_F(Http2FramesTest, OrdinaryTrafficPassesInPiecesOfAnySize) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::string traffic = Frame(kSettings, kAck, 0);
  for (int i = 0; i < 2000; ++i) {
    traffic += Frame(kHeaders, i % 2 == 0 ? kEndHeaders : 0, 200);
    if (i % 2 == 1) traffic += Frame(kContinuation, kEndHeaders, 300);
    traffic += Frame(kData, 0, random() % 16384) + Frame(kData, kEndStream, 0);
    Write(Frame(kData, 0, 16384));
    for (int n = 0; n < 20; ++n) traffic += Frame(kWindowUpdate, 0, 4);
  }
  for (size_t at = 0; at < traffic.size();) {
    const size_t bytes = std::min<size_t>(1 + random() % 3000, traffic.size() - at);
    ASSERT_EQ(Read(traffic.substr(at, bytes)), "") << "at " << at;
    at += bytes;
  }
}

TEST_F(Http2FramesTest, HeadersAreBoundedInBytesAndFrames) {
  EXPECT_EQ(Read(Frame(kHeaders, 0, 16384)), "");
  EXPECT_EQ(Read(Frame(kContinuation, kEndHeaders, 16384)), "");
  EXPECT_EQ(Read(Frame(kHeaders, 0, 16384)), "") << "another block";
  EXPECT_EQ(Read(Frame(kContinuation, 0, 16384)), "");
  EXPECT_EQ(Read(Frame(kContinuation, 0, 1)), "headers above 32 KiB");
  Restart();
  Read(Frame(kHeaders, 0, 10));
  EXPECT_EQ(FirstWrong(Frame(kContinuation, 0, 0), 100), Http2Frames::kHeaderFramesMax);
}

// With flags that gRPC does not take, ignores, or reads as something else. It skips PRIORITY (2),
// PUSH_PROMISE (5) and what HTTP/2 does not define, whatever their flags are.
TEST_F(Http2FramesTest, FramesHaveOnlyFlagsThatGrpcTakes) {
  constexpr uint8_t kTaken[] = {0x01, 0x25, 0xff, 0, 0x01, 0xff, 0x01, 0, 0, 0x04, 0xff, 0xff};
  for (int type = 0; type < static_cast<int>(std::size(kTaken)); ++type) {
    for (int bit = 0; bit < 8; ++bit) {
      const auto flag = static_cast<uint8_t>(1 << bit);
      Restart();
      EXPECT_EQ(Read(Frame(static_cast<uint8_t>(type), flag, 40)),
                (kTaken[type] & flag) != 0 ? "" : "a frame with flags that gRPC does not take")
          << "type " << type << ", flag " << bit;
    }
  }
}

TEST_F(Http2FramesTest, StreamsWaitForTheSettings) {
  EXPECT_EQ(FirstWrong(Frame(kHeaders, kEndHeaders, 10), 10), 6);
  Restart();
  EXPECT_EQ(FirstWrong(Frame(kHeaders, kEndHeaders, 10), 5), 0);
  EXPECT_EQ(Read(Frame(kSettings, kAck, 0)), "");
  EXPECT_EQ(FirstWrong(Frame(kHeaders, kEndHeaders, 10), 10'000), 0);
}

TEST_F(Http2FramesTest, FramesThatCarryNothingAreBoundedInTime) {
  constexpr int64_t kMax = Http2Frames::kIdleFramesMax;
  constexpr int64_t kPerSecond = Http2Frames::kIdleFramesPerSecond;
  for (const std::string& frame :
       {Frame(kPriority, 0, 5), Frame(kSettings, 0, 0), Frame(kData, 0, 0), Frame(kData, 0, 31),
        Frame(kUnknown, 0, 9)}) {
    Restart();
    EXPECT_EQ(FirstWrong(frame, kMax), 0);
    now_ += seconds(1);
    EXPECT_EQ(FirstWrong(frame, kPerSecond), 0);
    EXPECT_EQ(FirstWrong(frame, 1), 1);
    Restart();
    EXPECT_EQ(FirstWrong(frame, kMax), 0);
    now_ += seconds(1000);
    EXPECT_EQ(FirstWrong(frame, 2 * kMax), kMax + 1) << "no more than that is saved up";
  }
}

TEST_F(Http2FramesTest, WhatComesTooSeldomToCountAtOnceIsSavedUp) {
  constexpr int64_t kMax = Http2Frames::kIdleFramesMax;
  EXPECT_EQ(FirstWrong(Frame(kPriority, 0, 5), kMax), 0);
  // A third more often than one may come: each looks, none may lose what is left of a frame.
  for (int n = 0; n < 3000; ++n) {
    now_ += std::chrono::nanoseconds(1'000'000'000 / Http2Frames::kIdleFramesPerSecond * 4 / 3);
    ASSERT_EQ(Read(Frame(kPriority, 0, 5)), "") << n;
  }
}

TEST_F(Http2FramesTest, CallsWithoutAnswersAreBoundedWhileMemoryIsShort) {
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  Read(Frame(kSettings, kAck, 0));
  EXPECT_EQ(FirstWrong(call, 1000), 0);
  heap_bytes_ = 101;
  now_ += seconds(1);
  EXPECT_EQ(FirstWrong(call, 1000), 6);

  Restart();
  Read(Frame(kSettings, kAck, 0));
  for (int i = 0; i < 1000; ++i) {  // each of these is answered
    EXPECT_EQ(Read(Next(call)), "");
    Write(Frame(kHeaders, kEndHeaders, 5) + Frame(kData, 0, 40) + Frame(kHeaders, kEndStream, 5));
  }
  for (int i = 0; i < 100; ++i, now_ += seconds(1)) EXPECT_EQ(FirstWrong(call, 5), 0);
  heap_bytes_ = 180;
  now_ += seconds(1);
  EXPECT_EQ(FirstWrong(call, 1000), 2) << "a fifth of what the connection may have is left";
  heap_bytes_ = 1000;
  for (int i = 0; i < 3; ++i) {  // who waits for each answer is served even then
    Restart();
    now_ += seconds(1);
    EXPECT_EQ(Read(Frame(kSettings, kAck, 0) + Next(call)), "");
    Write(Frame(kData, 0, 40));
    EXPECT_EQ(FirstWrong(call, 1000), 2);
  }
  heap_bytes_ = 100;
  now_ += seconds(1);
  Restart();
  Read(Frame(kSettings, kAck, 0));
  EXPECT_EQ(FirstWrong(call, 1000), 0);
}

TEST_F(Http2FramesTest, CallsThatAreRefusedAreAnswered) {
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  const std::string refusal = Frame(kHeaders, kEndHeaders | kEndStream, 5);
  const std::string reset = Frame(kReset, 0, 4);
  Read(Frame(kSettings, kAck, 0));
  heap_bytes_ = 101;
  for (uint32_t stream = 1; stream < 2000; stream += 2) {
    ASSERT_EQ(Read(On(stream, call)), "") << stream;
    for (const char each : On(stream, refusal)) Write(std::string(1, each));
  }
  // So gRPC itself ends calls, some of them twice, and keeps what they took.
  now_ += seconds(1);
  uint32_t stream = 2001;
  while (Read(On(stream, call)).empty() && stream < 4000) {
    for (int twice = 0; twice < 2; ++twice) Write(On(stream, refusal) + On(stream, reset));
    stream += 2;
  }
  EXPECT_EQ(stream, 2001u + 2 * 5);

  Restart();
  Read(Frame(kSettings, kAck, 0) + On(1, call));
  Write(On(1, Frame(kHeaders, kEndHeaders, 5)) + On(1, Frame(kData, 0, 40)) + On(1, refusal));
  EXPECT_EQ(FirstWrong(call, 1000), 6) << "an answer and its end are one";
}

TEST_F(Http2FramesTest, CallsAreOpenUntilOneSideEndsThem) {
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  const std::string reset = Frame(kReset, 0, 4);
  const std::string trailers = Frame(kHeaders, kEndHeaders | kEndStream, 5);
  Read(Frame(kSettings, kAck, 0));
  for (const uint32_t stream : {1, 3, 5, 7, 9, 11}) Read(On(stream, call));
  Read(On(11, Frame(kData, kEndStream, 40)) + On(11, call));
  EXPECT_EQ(open_->Count(), 6) << "a client that says no more waits for its answer";
  Write(On(1, Frame(kHeaders, kEndHeaders, 5)) + On(1, Frame(kData, 0, 40)));
  EXPECT_EQ(open_->Count(), 6);
  Write(On(1, trailers));
  EXPECT_EQ(open_->Count(), 5);
  Write(On(3, Frame(kData, kEndStream, 0)) + On(5, reset));
  Read(On(7, reset));
  EXPECT_EQ(open_->Count(), 2);
  for (const uint32_t stream : {1, 3, 5, 7, 99}) {
    Write(On(stream, trailers) + On(stream, reset));
    Read(On(stream, reset));
  }
  EXPECT_EQ(open_->Count(), 2) << "each ends once";
  frames_.reset();
  EXPECT_EQ(open_->Count(), 0);
}

TEST_F(Http2FramesTest, OpenCallsAreBoundedInAllAndForEachPeer) {
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  open_ = std::make_shared<OpenCalls>(7, 4);
  peer_ = open_->Of("one");
  Restart();
  EXPECT_EQ(FirstWrong(call, 4), 0);
  const auto first_wrong_of = [&](Http2Frames& connection) {
    const std::string calls = std::string(24, 'P') + On(1, call) + On(3, call) + On(5, call);
    const char* const wrong =
        connection.Read({reinterpret_cast<const uint8_t*>(calls.data()), calls.size()}, now_);
    return std::string(wrong == nullptr ? "" : wrong);
  };
  {
    Http2Frames same({.streams = 5, .heap = nullptr, .calls = open_->Of("one")});
    EXPECT_EQ(first_wrong_of(same), "more open calls than one peer may have");
    Http2Frames another({.streams = 5, .heap = nullptr, .calls = open_->Of("two")});
    EXPECT_EQ(first_wrong_of(another), "");
    Http2Frames third({.streams = 5, .heap = nullptr, .calls = open_->Of("three")});
    EXPECT_EQ(first_wrong_of(third), "more open calls than --max-calls");
    EXPECT_EQ(open_->Count(), 7);
  }
  EXPECT_EQ(open_->Count(), 4) << "their connections have ended";
  Http2Frames third({.streams = 5, .heap = nullptr, .calls = open_->Of("three")});
  EXPECT_EQ(first_wrong_of(third), "");
}

// gRPC's clients send nothing else of calls that they give up at once, however many.
TEST_F(Http2FramesTest, ResetsAreBoundedOnlyWhereNothingIsOpen) {
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  const std::string reset = Frame(kReset, 0, 4);
  constexpr int64_t kMax = Http2Frames::kResetsMax;
  Read(Frame(kSettings, kAck, 0));
  for (uint32_t n = 0; n < 2 * kMax; ++n) {
    const std::string updates = Frame(kWindowUpdate, 0, 4) + Frame(kWindowUpdate, 0, 4);
    ASSERT_EQ(Read(On(2 * n + 1, call) + updates + On(2 * n + 1, reset)), "") << n;
  }
  EXPECT_EQ(FirstWrong(reset, 2 * kMax), kMax + 1);
  Restart();
  EXPECT_EQ(FirstWrong(reset, kMax), 0);
  now_ += seconds(1);
  EXPECT_EQ(FirstWrong(reset, Http2Frames::kResetsPerSecond), 0);
  EXPECT_EQ(FirstWrong(reset, 1), 1);
}

TEST_F(Http2FramesTest, HeadersToOldStreamsCarryNothing) {
  const std::string headers = Frame(kHeaders, kEndHeaders | kEndStream, 10);
  Read(Frame(kSettings, kAck, 0));
  int64_t passed = 0;
  while (Read(headers).empty() && passed < 100'000) ++passed;
  EXPECT_EQ(passed, Http2Frames::kIdleFramesMax);  // one begins a call, one acknowledged
}

// gRPC ignores the streams of even numbers; those of odd ones after them begin calls as ever.
TEST_F(Http2FramesTest, StreamsOfEvenNumbersAreNoCalls) {
  Read(On(0x7ffffffe, Frame(kHeaders, kEndHeaders, 10)));
  int64_t begun = 0;
  for (uint32_t n = 0; n < 100 && Read(On(2 * n + 1, Frame(kHeaders, kEndHeaders, 10))).empty();) {
    ++n, ++begun;
  }
  EXPECT_EQ(begun, 5);  // before the settings are acknowledged
  Restart();
  Read(Frame(kSettings, kAck, 0));
  const std::string even = On(2, Frame(kHeaders, kEndHeaders, 10));
  int64_t passed = 0;
  while (Read(even).empty() && passed < 100'000) ++passed;
  EXPECT_EQ(passed, Http2Frames::kIdleFramesMax - 1);
  EXPECT_EQ(open_->Count(), 0);
}

TEST_F(Http2FramesTest, EveryCallEndsOnce) {
  Read(Frame(kSettings, kAck, 0));
  const std::string end = Frame(kData, kEndStream, 0);
  for (int64_t n = 0; n < 2 * Http2Frames::kIdleFramesMax; ++n) {
    ASSERT_EQ(Read(Frame(kHeaders, kEndHeaders, 10) + end), "") << n;
  }
  EXPECT_EQ(FirstWrong(end, 100'000), Http2Frames::kIdleFramesMax);
}

// gRPC's clients send up to two updates for each answer that they read, however small.
TEST_F(Http2FramesTest, SmallAnswersMayBeAcknowledgedOneByOne) {
  const std::string update = Frame(kWindowUpdate, 0, 4);
  const std::string answer = Frame(kData, 0, 100);
  for (int64_t n = 0; n < 3 * Http2Frames::kIdleFramesMax; ++n) {
    for (const char each : answer) Write(std::string(1, each));
    ASSERT_EQ(Read(update + update), "") << n;
  }
}

TEST_F(Http2FramesTest, WindowUpdatesAreBoundedByWhatWasSent) {
  constexpr int64_t kMax = Http2Frames::kIdleFramesMax;
  const std::string update = Frame(kWindowUpdate, 0, 4);
  EXPECT_EQ(FirstWrong(update, 2 * kMax), kMax + 1);
  Restart();
  Write(Frame(kData, 0, 100 * Http2Frames::kBytesPerUpdate));
  EXPECT_EQ(FirstWrong(update, 2 * kMax), kMax + 100 + Http2Frames::kUpdatesPerFrame + 1);
}

TEST_F(Http2FramesTest, SmallMessagesAreNotBounded) {
  EXPECT_EQ(FirstWrong(Frame(kData, 0, 32), 5 * Http2Frames::kIdleFramesMax), 0);
}

// What is sent counts before its client can have it, and once though it is sent piece by piece.
TEST(ReadGuardTest, CallsEndAsTheirEndIsSentAndWithTheConnection) {
  constexpr int kSocket = (1 << 20) - 2;
  const test::ManualClock clock;
  const ReadGuard::OnWrong wrong = [](int, const char*) {};
  const auto open = std::make_shared<OpenCalls>(100, 100);
  const Http2Frames::Limits limits{.streams = 5, .heap = nullptr, .calls = open->Of("peer")};
  ASSERT_TRUE(ReadGuard::Begin(kSocket, 0, limits, clock, &wrong));
  std::string text;
  iovec piece{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  const auto set = [&](std::string bytes) {
    text = std::move(bytes);
    piece = {text.data(), text.size()};
  };
  const std::string call = Frame(kHeaders, kEndHeaders, 10);
  set(std::string(24, 'P') + On(1, call) + On(3, call) + On(5, call));
  EXPECT_TRUE(ReadGuard::Passes(kSocket, message, std::ssize(text)));
  EXPECT_EQ(open->Count(), 3);
  const std::string trailers = Frame(kHeaders, kEndHeaders | kEndStream, 20);
  const std::string both = On(1, trailers) + On(3, trailers);
  for (size_t at = 0; at < both.size(); at += 4) {
    set(both.substr(at));
    ReadGuard::Sending(kSocket, message);
    EXPECT_EQ(open->Count(), 1) << "before it is sent";
    ReadGuard::Sent(kSocket, std::min<ssize_t>(4, std::ssize(text)));
  }
  ReadGuard::End(kSocket);
  EXPECT_EQ(open->Count(), 0);
}

TEST(ReadGuardTest, RefusesDescriptorsThatItHasNoPlaceFor) {
  const test::ManualClock clock;
  const ReadGuard::OnWrong wrong = [](int, const char*) {};
  EXPECT_TRUE(ReadGuard::Begin((1 << 20) - 1, 0, {}, clock, &wrong));
  EXPECT_FALSE(ReadGuard::Begin(1 << 20, 0, {}, clock, &wrong));
  EXPECT_FALSE(ReadGuard::Begin(-1, 0, {}, clock, &wrong));
}

}  // namespace
}  // namespace attend
