// SPDX-License-Identifier: Apache-2.0
//
// Calls of methods that may bring so much each, found by their headers.

#include <gtest/gtest.h>

#include <optional>
#include <span>
#include <string>
#include <utility>

#include "server/net/http2_frames.h"

namespace attend {
namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kContinuation = 9;
constexpr uint8_t kEndStream = 1, kEndHeaders = 4, kHasPriority = 0x20;

std::span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Of fewer than 64 KiB, on a stream below 256.
std::string Frame(uint8_t type, uint8_t flags, uint8_t stream, const std::string& payload) {
  return std::string{0,
                     static_cast<char>(payload.size() >> 8),
                     static_cast<char>(payload.size()),
                     static_cast<char>(type),
                     static_cast<char>(flags),
                     0,
                     0,
                     0,
                     static_cast<char>(stream)} +
         payload;
}

std::string Headers(uint8_t stream, uint8_t flags, const std::string& payload,
                    uint8_t type = kHeaders) {
  return Frame(type, flags, stream, payload);
}

class MethodBoundsTest : public ::testing::Test {
 protected:
  MethodBoundsTest() { Restart(); }
  void Restart() {
    Http2Frames::Limits limits;
    limits.method_bounds = kBounds;
    frames_.emplace(limits);
    Read(std::string(24, 'P'));
  }
  std::string Read(const std::string& bytes) {
    const char* const wrong = frames_->Read(Bytes(bytes), TimePoint());
    return wrong == nullptr ? "" : wrong;
  }
  // How much the stream may bring, in KiB; -1: more than any bound here.
  int Bound(uint8_t stream) {
    const std::string frame = Frame(kData, 0, stream, std::string(1024, '\0'));
    for (int kib = 0; kib < 10; ++kib) {
      if (!Read(frame).empty()) return kib;
    }
    return -1;
  }

  inline static const MethodBound kBounds[] = {
      {"/h/Check", 4096}, {"/h/Large", 8192}, {"/h/Stream", MethodBound::kUnbounded, 8192}};
  // A path that enters the table of headers, or that does not.
  static std::string Path(const std::string& path, char how = 0x44) {
    return std::string{how, static_cast<char>(path.size())} + path;
  }

  std::optional<Http2Frames> frames_;
};

TEST_F(MethodBoundsTest, EachCallBringsWhatItsMethodTakes) {
  for (const auto& [path, bound] : {std::pair("/h/Check", 4), std::pair("/h/Large", 8)}) {
    for (const uint8_t bounded : {3, 5}) {
      Restart();
      EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/other"))), "");
      EXPECT_EQ(Read(Headers(3, kEndHeaders, Path(path))), "");
      EXPECT_EQ(Read(Headers(5, kEndHeaders, "\xbe")), "") << "what entered last";
      EXPECT_EQ(Read(Headers(7, kEndHeaders, "\xbf")), "") << "what entered before it";
      EXPECT_EQ(Bound(bounded), bound);
    }
  }
}

TEST_F(MethodBoundsTest, APathThatIsInNoListHasTheSmallestBound) {
  const std::string none = "\x83";  // :method: POST
  for (const std::string& headers : {Path("/other"), Path("/h/Check/"), Path(""), none}) {
    Restart();
    EXPECT_EQ(Read(Headers(1, kEndHeaders, headers)), "");
    EXPECT_EQ(Bound(1), 4) << headers;
    Restart();
    EXPECT_EQ(Read(Headers(1, 0, headers) + Headers(1, kEndHeaders, "", kContinuation)), "");
    EXPECT_EQ(Bound(1), 4) << headers;
  }
}

// gRPC 1.51 would read what this says is padding: a call of another method.
TEST_F(MethodBoundsTest, PaddedHeadersAreNotRead) {
  const std::string hidden = Path("/h/Check");
  const std::string padded = "\x83" + Path("/h/Stream") + std::string(0x83 - hidden.size(), 'p');
  EXPECT_EQ(Read(Headers(1, kEndHeaders | 0x8, padded + hidden)),
            "a frame with flags that gRPC does not take");
}

TEST_F(MethodBoundsTest, ABoundIsOfTheStreamThatItsHeadersAreOf) {
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Large"))), "");
  EXPECT_EQ(Read(Headers(3, kEndHeaders, Path("/h/Stream"))), "");
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Check"))), "") << "trailers";
  EXPECT_EQ(Bound(1), 8);
}

TEST_F(MethodBoundsTest, TheyAreFoundHoweverTheirHeadersCome) {
  const std::string path = Path("/h/Check", 0x04);
  const auto bound_of = [&](const std::string& bytes, size_t longest) {
    Restart();
    for (size_t at = 0; at < bytes.size(); at += longest) {
      EXPECT_EQ(Read(bytes.substr(at, longest)), "");
    }
    return Bound(1);
  };
  for (const size_t longest : {size_t{1}, size_t{3}, size_t{1000}}) {
    EXPECT_EQ(bound_of(Headers(1, kEndHeaders, path), longest), 4);
    EXPECT_EQ(bound_of(Headers(1, kEndHeaders | kHasPriority, std::string(5, 'p') + path), longest),
              4);
    EXPECT_EQ(bound_of(Headers(1, 0, path) + Headers(1, kEndHeaders, "", kContinuation), longest),
              4);
    EXPECT_EQ(bound_of(Headers(1, 0, "") + Headers(1, 0, path.substr(0, 4), kContinuation) +
                           Headers(1, kEndHeaders, path.substr(4), kContinuation),
                       longest),
              4);
    EXPECT_EQ(bound_of(Headers(1, kEndHeaders, Path("/h/Large", 0x04)), longest), 8);
  }
}

TEST_F(MethodBoundsTest, OfSeveralPathsTheOneThatAllowsLeastCounts) {
  for (const char* const other : {"/h/Large", "/other"}) {
    for (const bool first : {false, true}) {
      Restart();
      const std::string check = Path("/h/Check");
      EXPECT_EQ(Read(Headers(1, kEndHeaders, first ? check + Path(other) : Path(other) + check)),
                "");
      EXPECT_EQ(Bound(1), 4);
    }
  }
}

// A message of so many bytes, which begins with its length.
std::string Message(uint32_t bytes) {
  std::string message(5 + bytes, 'd');
  message[0] = 0;
  for (int i = 0; i < 4; ++i) message[1 + i] = static_cast<char>(bytes >> (24 - 8 * i));
  return message;
}

TEST_F(MethodBoundsTest, AStreamBringsAnyNumberOfMessagesThatAreNotTooLong) {
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Stream"))), "");
  for (int i = 0; i < 10; ++i) {
    const std::string message = Message(8192);
    EXPECT_EQ(Read(Frame(kData, 0, 1, message.substr(0, 3))), "");
    EXPECT_EQ(Read(Frame(kData, 0, 1, message.substr(3) + Message(0) + Message(100))), "");
  }
  EXPECT_NE(Read(Frame(kData, 0, 1, Message(8193).substr(0, 5))), "") << "its length says so";
}

TEST_F(MethodBoundsTest, WhatAMessageSaysOfItsLengthIsEnough) {
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Check"))), "");
  EXPECT_EQ(Read(Frame(kData, 0, 1, Message(1 << 20).substr(0, 4))), "");
  EXPECT_NE(Read(Frame(kData, 0, 1, "\1")), "");
}

TEST_F(MethodBoundsTest, TrailersGiveACallNoMore) {
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Check"))), "");
  EXPECT_EQ(Read(Frame(kData, 0, 1, std::string(3072, '\0'))), "");
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Large"))), "");
  EXPECT_EQ(Bound(1), 1);
}

TEST_F(MethodBoundsTest, HeadersThatCannotBeDecodedEndTheConnection) {
  EXPECT_NE(Read(Headers(1, kEndHeaders, "\xff")), "");
  Restart();
  EXPECT_NE(Read(Headers(1, kEndHeaders | kHasPriority, "abc")), "");
}

TEST_F(MethodBoundsTest, AStreamThatHasEndedIsForgotten) {
  EXPECT_EQ(Read(Headers(1, kEndHeaders, Path("/h/Check"))), "");
  frames_->Written(Bytes(Frame(kData, kEndStream, 1, "ab")));
  EXPECT_EQ(Bound(1), -1) << "gRPC drops it";
}

}  // namespace
}  // namespace attend
