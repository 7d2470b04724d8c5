// SPDX-License-Identifier: Apache-2.0

#include "server/schedule/tenants.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace attend {
namespace {

TEST(Tenants, WithoutSettingsThereIsOnlyDefault) {
  const Tenants tenants;
  EXPECT_TRUE(tenants.single());
  EXPECT_EQ(tenants.list().front().name, "default");
  EXPECT_EQ(tenants.weights(), std::vector<int32_t>{1});
  EXPECT_EQ(tenants.Find("anyone"), 0);
}

TEST(Tenants, AreFoundByNameAndUnknownNamesAreDefault) {
  const Result<Tenants> tenants = Tenants::Parse({"research=3", "default=2", "prod.eu-1=1000"});
  ASSERT_TRUE(tenants.ok()) << tenants.status().ToString();
  EXPECT_FALSE(tenants->single());
  EXPECT_EQ(tenants->weights(), (std::vector<int32_t>{2, 3, 1000}));
  EXPECT_EQ(tenants->Find("default"), 0);
  EXPECT_EQ(tenants->Find("research"), 1);
  EXPECT_EQ(tenants->Find("prod.eu-1"), 2);
  for (const char* stranger : {"", "Research", "research ", "research=3", "resea"}) {
    EXPECT_EQ(tenants->Find(stranger), 0) << stranger;
  }
  EXPECT_EQ(tenants->Find(std::string(1 << 20, 'x')), 0);
  EXPECT_EQ(tenants->Find(std::string("research\0", 9)), 0);
}

TEST(Tenants, WithTokensDefaultHasNoWeightUnlessGiven) {
  const auto weights = [](const std::vector<std::string>& settings) {
    return Tenants::Parse(settings)->ForKnownCallers().weights();
  };
  EXPECT_EQ(weights({"a=3", "b=2"}), (std::vector<int32_t>{0, 3, 2}));
  EXPECT_EQ(weights({"a=3", "default=1"}), (std::vector<int32_t>{1, 3})) << "given";
  EXPECT_EQ(weights({}), std::vector<int32_t>{1}) << "alone";
}

TEST(Tenants, BadSettingsAreReportedWithTheirBound) {
  const std::string longest(64, 'n');
  EXPECT_TRUE(ParseTenant(longest + "=1").ok());
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"a", "NAME=WEIGHT"},
      {"", "NAME=WEIGHT"},
      {"=1", "64"},
      {longest + "n=1", "64"},
      {"a b=1", "letters"},
      {"a\n=1", "letters"},
      {"\xc3\xa4=1", "letters"},
      {"a=0", "[1, 1000]"},
      {"a=-1", "[1, 1000]"},
      {"a=1001", "[1, 1000]"},
      {"a=99999999999", "[1, 1000]"},
      {"a=1.5", "[1, 1000]"},
      {"a=", "[1, 1000]"},
      {"a=1=2", "[1, 1000]"},
      {"a= 1", "[1, 1000]"},
  };
  for (const auto& [text, part] : bad) {
    const Result<Tenants> tenants = Tenants::Parse({text});
    ASSERT_FALSE(tenants.ok()) << text;
    EXPECT_EQ(tenants.status().code(), Code::kInvalidArgument);
    EXPECT_NE(tenants.status().message().find("\"" + text + "\""), std::string::npos);
    EXPECT_NE(tenants.status().message().find(part), std::string::npos)
        << tenants.status().message();
  }
}

TEST(Tenants, DuplicateNamesAndTooManyTenantsAreRefused) {
  EXPECT_NE(Tenants::Parse({"a=1", "a=1"}).status().message().find("\"a\" is given twice"),
            std::string::npos);
  EXPECT_FALSE(Tenants::Parse({"default=1", "default=2"}).ok());
  std::vector<std::string> settings;
  for (int i = 1; i < kTenantsMax; ++i) settings.push_back("t" + std::to_string(i) + "=1");
  EXPECT_TRUE(Tenants::Parse(settings).ok());
  settings.push_back("last=1");
  EXPECT_NE(Tenants::Parse(settings).status().message().find("64"), std::string::npos);
}

}  // namespace
}  // namespace attend
