// SPDX-License-Identifier: Apache-2.0

#include "server/limits/tenant_bounds.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

const std::vector<std::string> kTenants = {"default", "research", "prod.eu-1"};

std::vector<TenantBounds> Parse(const std::string& text) {
  const Result<std::vector<TenantBounds>> bounds = ParseLimits(text, kTenants);
  EXPECT_TRUE(bounds.ok()) << bounds.status().ToString();
  return bounds.ok() ? *bounds : std::vector<TenantBounds>(kTenants.size());
}

TEST(TenantBounds, AnEmptyFileSetsNoBounds) {
  for (const char* text : {"", "\n\n", "# a comment\n; another\r\n", "[research]\n"}) {
    const std::vector<TenantBounds> bounds = Parse(text);
    ASSERT_EQ(bounds.size(), 3U);
    for (const TenantBounds& each : bounds) {
      EXPECT_EQ(each, TenantBounds());
      EXPECT_EQ(each[Limit::kInFlight], kUnlimited);
      EXPECT_EQ(each[Limit::kSmallCalls], kSmallCallsDefault);
      EXPECT_FALSE(each.bytes.bounded());
    }
  }
}

TEST(TenantBounds, SectionsOverrideTheGeneralBounds) {
  const std::vector<TenantBounds> bounds = Parse(R"(
requests-in-flight = 64   # of each tenant
bytes-per-second = "1GiB"
gflop-per-second = 0.5
checks = 3
session-memory = 64 MiB
streams = 8 ; and so on
shared-memory = 1GiB
connections = 16
sessions = 9
[ research ] # ours
requests-in-flight = none
small-calls-in-flight = none
bytes-burst = 4096
"gflop-per-second" = 2e3
gflop-burst = 1
["prod.eu-1"]
bytes-per-second = '10B'
gflop-per-second = none
[default]
sessions = 8)");
  const TenantBounds& all = bounds[0];
  EXPECT_EQ(all[Limit::kInFlight], 64);
  EXPECT_EQ(all.bytes, (Rate{1 << 30, 1 << 30}));  // the burst defaults to one second's worth
  EXPECT_EQ(all.cost, (Rate{500'000'000, 500'000'000}));
  EXPECT_EQ(all[Limit::kChecks], 3);
  EXPECT_EQ(all[Limit::kSessionMemory], 64 << 20);
  EXPECT_EQ(all[Limit::kStreams], 8);
  EXPECT_EQ(all[Limit::kSharedMemory], 1 << 30);
  EXPECT_EQ(all[Limit::kConnections], 16);
  EXPECT_EQ(all[Limit::kSessions], 8) << "[default] is a tenant as any other";
  EXPECT_EQ(all[Limit::kSmallCalls], kSmallCallsDefault);
  const TenantBounds& research = bounds[1];
  EXPECT_EQ(research[Limit::kInFlight], kUnlimited);
  EXPECT_EQ(research[Limit::kSmallCalls], kUnlimited);
  EXPECT_EQ(research.bytes, (Rate{1 << 30, 4096}));
  EXPECT_EQ(research.cost, (Rate{2'000'000'000'000, 1'000'000'000}));
  EXPECT_EQ(research[Limit::kStreams], 8);
  EXPECT_EQ(research[Limit::kSessions], 9);
  EXPECT_EQ(bounds[2].bytes, (Rate{10, 10}));
  EXPECT_FALSE(bounds[2].cost.bounded());
}

TEST(TenantBounds, AGeneralBurstAppliesOnlyToTenantsWithARate) {
  const std::vector<TenantBounds> bounds =
      Parse("bytes-per-second = 10\nbytes-burst = 7\n[research]\nbytes-per-second = none\n");
  EXPECT_EQ(bounds[0].bytes, (Rate{10, 7}));
  EXPECT_EQ(bounds[1].bytes, Rate());
}

TEST(TenantBounds, ErrorsNameLineKeyValueAndBound) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"requests-in-flight = 0",
       "line 1: requests-in-flight is \"0\", must be a whole number in "
       "[1, 16777216], or none"},
      {"\n[research]\nchecks = -1", "line 3: [research] checks is \"-1\", must be a whole"},
      {"streams = 16777217", "\"16777217\", must be"},
      {"streams = 1.5", "\"1.5\", must be"},
      {"connections = 0", "connections is \"0\", must be a whole number in [1, 16777216]"},
      {"shared-memory = 0", "shared-memory is \"0\", must be a size in [1, 1024TiB]"},
      {"streams =", "streams is \"\", must be"},
      {"streams = 99999999999999999999", "must be a whole"},
      {"bytes-per-second = fast", "must be a size in [1, 1024TiB] such as 64MiB, or none"},
      {"bytes-per-second = 0", "must be a size"},
      {"bytes-per-second = 1025TiB", "must be a size"},
      {"gflop-per-second = nan", "must be a number in [0.001, 1e9], or none"},
      {"gflop-per-second = inf", "must be a number"},
      {"gflop-per-second = -1", "must be a number"},
      {"gflop-per-second = 0.0009", "must be a number"},
      {"gflop-per-second = 1.1e9", "must be a number"},
      {"streams", "line 1: \"streams\" must be KEY = VALUE or [TENANT]"},
      {"stream = 1", "\"stream\" must be one of requests-in-flight, bytes-per-second"},
      {"= 1", "must be one of"},
      {"streams = 1\nstreams = 2", "line 2: streams is given twice"},
      {"[research]\n[research]", "line 2: [research] is given twice"},
      {"[unknown]", "line 1: [unknown] must be a tenant that --tenant names"},
      {"[]", "must be a tenant"},
      {"[research", "must be [TENANT]"},
      {"bytes-burst = 1", "line 1: bytes-burst is \"1\", must be none without bytes-per"},
      {"bytes-per-second = 1\n[research]\nbytes-per-second = none\nbytes-burst = 1",
       "line 4: [research] bytes-burst is \"1\", must be none"},
      {"gflop-burst = 1", "must be none without gflop-per-second"},
  };
  for (const auto& [text, words] : bad) {
    const Result<std::vector<TenantBounds>> bounds = ParseLimits(text, kTenants);
    ASSERT_FALSE(bounds.ok()) << text;
    EXPECT_EQ(bounds.status().code(), Code::kInvalidArgument);
    EXPECT_NE(bounds.status().message().find(words), std::string::npos)
        << text << ": " << bounds.status().message();
  }
  EXPECT_FALSE(ParseLimits(std::string(kLimitsBytesMax + 1, '\n'), kTenants).ok());
  EXPECT_TRUE(ParseLimits(std::string(kLimitsBytesMax, '\n'), kTenants).ok());
}

}  // namespace
}  // namespace attend
