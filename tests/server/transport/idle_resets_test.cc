// SPDX-License-Identifier: Apache-2.0

#include "server/transport/idle_resets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

namespace attend {
namespace {

std::string Frame(uint8_t type, uint32_t stream, const std::string& payload) {
  const auto byte = [](size_t value) { return static_cast<char>(value); };
  return std::string{byte(payload.size() >> 16),
                     byte(payload.size() >> 8),
                     byte(payload.size()),
                     byte(type),
                     byte(0),
                     byte(stream >> 24),
                     byte(stream >> 16),
                     byte(stream >> 8),
                     byte(stream)} +
         payload;
}

// A connection's bytes, and what is left of them.
struct Bytes {
  std::string came = NGHTTP2_CLIENT_MAGIC, passed = NGHTTP2_CLIENT_MAGIC;
  int64_t left_out = 0;

  void Add(const std::string& frame, bool passes) {
    came += frame;
    passed += passes ? frame : "";
    left_out += passes ? 0 : 1;
  }
};

Bytes RandomBytes(std::mt19937& random) {
  Bytes bytes;
  uint32_t newest = 0;
  for (int n = 0; n < 30; ++n) {
    const uint32_t stream = 2 * (random() % 40) + 1;
    switch (random() % 4) {
      case 0:
        bytes.Add(Frame(NGHTTP2_HEADERS, stream, std::string(random() % 20, 'h')), true);
        newest = std::max(newest, stream);
        break;
      case 1:
        bytes.Add(Frame(NGHTTP2_DATA, stream, std::string(random() % 300, 'd')), true);
        break;
      default:
        bytes.Add(Frame(NGHTTP2_RST_STREAM, stream, "why?"), stream <= newest);
        break;
    }
  }
  return bytes;
}

TEST(IdleResetsTest, AreLeftOutHoweverTheBytesCome) {
  std::mt19937 random(1);
  for (int n = 0; n < 500; ++n) {
    const Bytes bytes = RandomBytes(random);
    const size_t piece_max = 1 + random() % (n % 2 == 0 ? 12 : 1000);
    IdleResets resets;
    std::string passed;
    for (size_t at = 0; at < bytes.came.size();) {
      const size_t count = std::min(bytes.came.size() - at, 1 + random() % piece_max);
      // A copy, so that a sanitizer sees reads beyond it.
      const std::string copy = bytes.came.substr(at, count);
      std::string_view piece = copy;
      for (std::string_view part = resets.Next(piece); !part.empty(); part = resets.Next(piece)) {
        passed += part;
      }
      EXPECT_TRUE(piece.empty());
      at += count;
    }
    ASSERT_EQ(passed, bytes.passed) << n;
    ASSERT_EQ(resets.TakeCount(), bytes.left_out) << n;
    ASSERT_EQ(resets.TakeCount(), 0);
  }
}

TEST(IdleResetsTest, OthersPass) {
  for (const std::string& frame :
       {Frame(NGHTTP2_RST_STREAM, 0, "why?"), Frame(NGHTTP2_RST_STREAM, 2, "why?"),
        Frame(NGHTTP2_RST_STREAM, 1, "why"), Frame(NGHTTP2_RST_STREAM, 1, "why??"),
        Frame(NGHTTP2_WINDOW_UPDATE, 1, "many"), Frame(NGHTTP2_PING, 0, "8 bytes.")}) {
    IdleResets resets;
    const std::string all = NGHTTP2_CLIENT_MAGIC + frame;
    std::string_view bytes = all;
    EXPECT_EQ(resets.Next(bytes), all);
    EXPECT_EQ(resets.TakeCount(), 0);
  }
}

}  // namespace
}  // namespace attend
