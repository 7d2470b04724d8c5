// SPDX-License-Identifier: Apache-2.0

#include "server/transport/metadata.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>

namespace attend {
namespace {

TEST(Base64, MatchesTheStandardsExamples) {
  EXPECT_EQ(EncodeBase64(""), "");
  EXPECT_EQ(EncodeBase64("f"), "Zg");
  EXPECT_EQ(EncodeBase64("fo"), "Zm8");
  EXPECT_EQ(EncodeBase64("foo"), "Zm9v");
  EXPECT_EQ(EncodeBase64("foobar"), "Zm9vYmFy");
}

TEST(Base64, RoundTrips) {
  std::mt19937 random(std::random_device{}());
  for (size_t size = 0; size < 200; ++size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    std::string text = EncodeBase64(bytes);
    ASSERT_EQ(DecodeBase64(text), bytes);
    text.append((4 - text.size() % 4) % 4, '=');
    ASSERT_EQ(DecodeBase64(text), bytes);
  }
}

TEST(Base64, RefusesMalformedText) {
  for (const char* const text : {"A", "Zg=", "Zg===", "=", "Zm9v=", "Zm 9", "Zm-_", "Zg==Zg=="}) {
    EXPECT_FALSE(DecodeBase64(text)) << text;
  }
}

TEST(Metadata, DecodesBinaryValues) {
  CallMetadata metadata;
  EXPECT_TRUE(AddReceived("a-bin", "AAE, Zg==", metadata));
  EXPECT_TRUE(AddReceived("b", "one, two", metadata));
  EXPECT_FALSE(AddReceived("c-bin", "?", metadata));
  ASSERT_EQ(metadata.size(), 3u);
  EXPECT_EQ(metadata[0].second, std::string("\0\1", 2));
  EXPECT_EQ(metadata[1].second, "f");
  EXPECT_EQ(*metadata.Find("b"), "one, two");
  EXPECT_EQ(metadata.Find("c-bin"), std::nullopt);
}

TEST(Metadata, IsEmptyAfterClear) {
  CallMetadata metadata;
  for (const size_t bytes : {1, 5000, 1}) {
    metadata.Add("key", std::string(bytes, 'v'));
    metadata.Add("", "");
    EXPECT_EQ(metadata.Find("key")->size(), bytes);
    EXPECT_EQ(*metadata.Find(""), "");
    metadata.Clear();
    EXPECT_TRUE(metadata.empty());
    EXPECT_EQ(metadata.Find("key"), std::nullopt);
  }
}

TEST(PercentEncode, KeepsPrintableAscii) {
  EXPECT_EQ(PercentEncode("a b~"), "a b~");
  EXPECT_EQ(PercentEncode("100%\n\xc3\xa9"), "100%25%0A%C3%A9");
}

TEST(ParseTimeout, ParsesEveryUnit) {
  using namespace std::chrono;
  EXPECT_EQ(ParseTimeout("1H"), hours(1));
  EXPECT_EQ(ParseTimeout("2M"), minutes(2));
  EXPECT_EQ(ParseTimeout("3S"), seconds(3));
  EXPECT_EQ(ParseTimeout("4m"), milliseconds(4));
  EXPECT_EQ(ParseTimeout("5u"), microseconds(5));
  EXPECT_EQ(ParseTimeout("99999999n"), nanoseconds(99999999));
  EXPECT_EQ(ParseTimeout("99999999H"), Duration::max());
}

TEST(ParseTimeout, RefusesMalformedText) {
  for (const char* const text : {"", "1", "S", "-1S", "1.5S", "1s", "123456789S", " 1S", "1S "}) {
    EXPECT_FALSE(ParseTimeout(text)) << text;
  }
}

}  // namespace
}  // namespace attend
