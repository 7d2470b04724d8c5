// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/load/value_list.h"

namespace attend::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ValueBounds kWhole = {1, 100000, true};
constexpr ValueBounds kReal = {1e-3, 1e7};

std::vector<double> Values(const std::string& text, const ValueBounds& bounds = kWhole) {
  const Result<std::vector<double>> values = ParseValues("--concurrency", text, bounds);
  EXPECT_TRUE(values.ok()) << values.status().ToString();
  return values.ok() ? *values : std::vector<double>{};
}

TEST(ValueList, ParsesValuesAndRanges) {
  const std::vector<std::pair<std::string, std::vector<double>>> cases = {
      {"7", {7}},
      {"1,8,64", {1, 8, 64}},
      {"1:4", {1, 2, 3, 4}},
      {"1:16:+4", {1, 5, 9, 13}},
      {"4:16:4", {4, 8, 12, 16}},
      {"1:64:x2", {1, 2, 4, 8, 16, 32, 64}},
      {"3:100:x10", {3, 30}},
      {"5:5:x2", {5}},
      {"1:4:x2,6,8:9", {1, 2, 4, 6, 8, 9}},
  };
  for (const auto& [text, values] : cases) EXPECT_EQ(Values(text), values) << text;
}

TEST(ValueList, TheEndOfARangeIsNotLostToRounding) {
  EXPECT_EQ(Values("0.1:1:0.1", kReal).size(), 10u);
  EXPECT_NEAR(Values("100:1000:x1.2589254117941673", kReal).back(), 1000, 1e-6);
}

TEST(ValueList, EveryErrorIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a number"},
      {"a", "\"a\" is not a number"},
      {"1,", "not a number"},
      {"nan", "not a number"},
      {"1:2:3:4", "FIRST:LAST"},
      {"8:1", "ends before it begins"},
      {"1:8:x1", "factor is 1, must be above 1"},
      {"1:8:x0.5", "must be above 1"},
      {"1:8:+0", "step is 0, must be above 0"},
      {"1:8:-1", "must be above 0"},
      {"0", "0 is not in [1, 100000]"},
      {"-1", "-1 is not in [1, 100000]"},
      {"-5:-1", "-5 is not in [1, 100000]"},
      {"1:1000000:x10", "1000000 is not in [1, 100000]"},
      {"1.5", "1.5 is not a whole number"},
      {"3:8:x1.5", "4.5 is not a whole number"},
      {"1:2000", "more than 1000 values"},
  };
  for (const auto& [text, words] : cases) {
    const Result<std::vector<double>> values = ParseValues("--concurrency", text, kWhole);
    ASSERT_FALSE(values.ok()) << text;
    EXPECT_EQ(values.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(values.status().message(), AllOf(HasSubstr("--concurrency"), HasSubstr(words)))
        << text;
  }
}

}  // namespace
}  // namespace attend::client
