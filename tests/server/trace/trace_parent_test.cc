// SPDX-License-Identifier: Apache-2.0
//
// Which strings are traceparents, as specified by W3C Trace Context; ids do not repeat.

#include "server/trace/trace_parent.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "server/trace/tracer.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

constexpr char kGood[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceParentTest, RoundTrips) {
  const std::optional<TraceParent> parent = ParseTraceParent(kGood);
  ASSERT_TRUE(parent.has_value());
  EXPECT_EQ(parent->trace_high, 0x4bf92f3577b34da6u);
  EXPECT_EQ(parent->trace_low, 0xa3ce929d0e0e4736u);
  EXPECT_EQ(parent->span, 0x00f067aa0ba902b7u);
  EXPECT_TRUE(parent->sampled);
  EXPECT_TRUE(parent->valid());
  EXPECT_EQ(FormatTraceParent(*parent), kGood);
  EXPECT_EQ(TraceIdText(*parent), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(SpanIdText(parent->span), "00f067aa0ba902b7");
  std::string unsampled = kGood;
  unsampled.back() = '0';
  EXPECT_FALSE(ParseTraceParent(unsampled)->sampled);
  EXPECT_EQ(FormatTraceParent(*ParseTraceParent(unsampled)), unsampled);
}

TEST(TraceParentTest, UnknownFlagsAreDropped) {
  std::string text = kGood;
  text.replace(53, 2, "ff");
  EXPECT_EQ(FormatTraceParent(*ParseTraceParent(text)), kGood);
  text.replace(53, 2, "fe");
  EXPECT_FALSE(ParseTraceParent(text)->sampled);
}

TEST(TraceParentTest, LaterVersionsMayHaveMoreFields) {
  const std::string rest = std::string(kGood).substr(2);
  EXPECT_TRUE(ParseTraceParent("01" + rest).has_value());
  EXPECT_TRUE(ParseTraceParent("cc" + rest + "-what-the-future-will-be").has_value());
  EXPECT_EQ(FormatTraceParent(*ParseTraceParent("cc" + rest + "-x")), kGood);
  EXPECT_FALSE(ParseTraceParent("cc" + rest + "x").has_value());
  EXPECT_FALSE(ParseTraceParent("00" + rest + "-x").has_value());
  EXPECT_FALSE(ParseTraceParent("ff" + rest).has_value());
}

TEST(TraceParentTest, MalformedStringsAreRejected) {
  for (const char* bad :
       {"", "00", "00-", "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0g",
        " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 ",
        "0x-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}) {
    EXPECT_FALSE(ParseTraceParent(bad).has_value()) << bad;
  }
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 10'000; ++i) {
    std::string text = kGood;
    for (uint64_t changes = random() % 3; changes > 0; --changes) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) text.resize(random() % 80, 'a');
    const std::optional<TraceParent> parent = ParseTraceParent(text);
    if (!parent) continue;
    EXPECT_TRUE(parent->valid());
    const std::string again = FormatTraceParent(*parent);
    EXPECT_EQ(again.substr(2, 51), text.substr(2, 51));
    EXPECT_EQ(ParseTraceParent(again), parent);
  }
}

TEST(SpanIdsTest, IdsAreNeverZeroOrRepeated) {
  SpanIds ids(1, 2);
  std::set<uint64_t> spans;
  std::set<std::string> traces;
  for (int i = 0; i < 10'000; ++i) {
    spans.insert(ids.NextSpan());
    const TraceParent root = ids.NextTrace();
    EXPECT_TRUE(root.valid() && root.sampled);
    EXPECT_TRUE(ParseTraceParent(FormatTraceParent(root)).has_value());
    spans.insert(root.span);
    traces.insert(TraceIdText(root));
  }
  EXPECT_EQ(spans.size(), 20'000u);
  EXPECT_EQ(traces.size(), 10'000u);
  EXPECT_FALSE(spans.contains(0));
  EXPECT_NE(SpanIds(1, 2).NextSpan(), SpanIds(2, 2).NextSpan());
}

}  // namespace
}  // namespace attend
