// SPDX-License-Identifier: Apache-2.0

#include "server/transport/frame_cutter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

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

TEST(FrameCutterTest, CutsFramesHoweverTheBytesArrive) {
  std::mt19937 random(1);
  for (int n = 0; n < 500; ++n) {
    std::string came = NGHTTP2_CLIENT_MAGIC;
    std::vector<std::string> frames = {came};
    for (int frame = 0; frame < 30; ++frame) {
      const size_t bytes = random() % 4 == 0 ? 0 : random() % (random() % 8 == 0 ? 70000 : 40);
      frames.push_back(Frame(static_cast<uint8_t>(random() % 12), random() % 100,
                             std::string(bytes, static_cast<char>('a' + frame % 26))));
      came += frames.back();
    }
    const size_t piece_max = 1 + random() % (n % 2 == 0 ? 12 : 100000);
    FrameCutter cutter;
    std::vector<std::string> cut = {""};
    for (size_t at = 0; at < came.size();) {
      const size_t count = std::min(came.size() - at, 1 + random() % piece_max);
      // A copy, so that a sanitizer sees reads beyond its end.
      const std::string copy = came.substr(at, count);
      std::string_view bytes = copy;
      for (std::string_view part = cutter.Next(bytes); !part.empty(); part = cutter.Next(bytes)) {
        if (cutter.begins()) {
          ASSERT_GE(part.size(), 9u);
          cut.emplace_back();
        }
        cut.back() += part;
        const size_t head = cut.size() == 1 ? 0 : 9;
        ASSERT_EQ(cutter.left(), frames[cut.size() - 1].size() - cut.back().size());
        if (head == 0) continue;
        ASSERT_EQ(cutter.head().length, frames[cut.size() - 1].size() - head);
        ASSERT_EQ(cutter.head().type, static_cast<uint8_t>(cut.back()[3]));
        ASSERT_EQ(cutter.head().stream_id, static_cast<uint8_t>(cut.back()[8]));
      }
      EXPECT_TRUE(bytes.empty());
      at += count;
    }
    ASSERT_EQ(cut, frames) << n;
  }
}

TEST(FrameCutterTest, RequiresThePreface) {
  FrameCutter cutter;
  std::string_view bytes = NGHTTP2_CLIENT_MAGIC;
  EXPECT_EQ(cutter.Next(bytes).size(), size_t{NGHTTP2_CLIENT_MAGIC_LEN});
  EXPECT_FALSE(cutter.begins());
  EXPECT_EQ(cutter.head().type, FrameCutter::kPreface);
}

}  // namespace
}  // namespace attend
