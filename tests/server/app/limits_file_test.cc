// SPDX-License-Identifier: Apache-2.0

#include "server/app/limits_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/server/support/parsed_config.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class LimitsFileTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) { std::ofstream(path_, std::ios::trunc) << text; }
  std::string Error(const std::string& path) {
    const Result<std::vector<TenantBounds>> read = ReadLimits(path, Tenants());
    return read.ok() ? std::string() : read.status().message();
  }

  test::TemporaryDirectory folder_;
  const std::string path_ = folder_.path() / "limits.toml";
};

TEST_F(LimitsFileTest, IsLoadedThroughItsFlag) {
  Write("checks = 3\n[a]\nchecks = 4\n");
  const std::string flag = "--limits=" + path_;
  const test::ParsedConfig known = test::ParseFlags({"--tenant=a=2", flag});
  ASSERT_EQ(known.outcome, ConfigOutcome::kRun) << known.text;
  ASSERT_EQ(known.config.limits.size(), 2U);
  EXPECT_EQ(known.config.limits[0][Limit::kChecks], 3);
  EXPECT_EQ(known.config.limits[1][Limit::kChecks], 4);
  const test::ParsedConfig unknown = test::ParseFlags({flag});
  EXPECT_EQ(unknown.outcome, ConfigOutcome::kError);
  EXPECT_THAT(unknown.text, StartsWith("attend-server: --limits: " + path_ +
                                       ": line 2: [a] must be a tenant that --tenant names"));
}

TEST_F(LimitsFileTest, AFileThatIsTooLargeOrUnreadableIsRefused) {
  EXPECT_THAT(Error(path_), HasSubstr(path_ + " cannot be read: No such file"));
  EXPECT_THAT(Error("/dev/null"), HasSubstr("/dev/null is not a regular file"));
  EXPECT_THAT(Error(folder_.path()), HasSubstr("is not a regular file"));
  Write(std::string(kLimitsBytesMax, '\n'));
  EXPECT_EQ(Error(path_), "");
  Write(std::string(kLimitsBytesMax + 1, '\n'));
  EXPECT_THAT(Error(path_), HasSubstr("has more than 1048576 bytes"));
}

}  // namespace
}  // namespace attend
