// SPDX-License-Identifier: Apache-2.0
//
// Which calls get a line in the access log, and that no value in a line can pose as another field.

#include "server/log/access_log.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "tests/kernels/support/manual_clock.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class AccessLogTest : public ::testing::Test {
 protected:
  std::unique_ptr<AccessLog> Open(AccessLog::Options options) {
    options.path = path_;
    Result<std::unique_ptr<AccessLog>> log = AccessLog::Open(options, logger_, clock_);
    EXPECT_TRUE(log.ok()) << log.status().ToString();
    return std::move(*log);
  }
  static int64_t Ns(milliseconds time) { return std::chrono::nanoseconds(time).count(); }

  const test::TemporaryDirectory folder_;
  const std::string path_ = folder_.path() / "access.log";
  test::ManualClock clock_;
  Logger logger_{Logger::Options(), std::make_shared<spdlog::sinks::null_sink_mt>()};
};

TEST_F(AccessLogTest, FailedAndSlowCallsAreAlwaysLoggedAndOthersSampled) {
  const auto all = Open({.sample = 1, .slow = milliseconds(50)});
  const auto none = Open({.sample = 0, .slow = milliseconds(50)});
  const auto some = Open({.sample = 0.25, .slow = milliseconds(50)});
  int written = 0;
  for (uint64_t id = 0; id < 4000; ++id) {
    EXPECT_TRUE(all->Wants(id, false, 0));
    EXPECT_FALSE(none->Wants(id, false, Ns(milliseconds(50))));
    EXPECT_TRUE(none->Wants(id, true, 0));
    EXPECT_TRUE(none->Wants(id, false, Ns(milliseconds(50)) + 1));
    EXPECT_EQ(some->Wants(id, false, 0), some->Wants(id, false, 0));
    written += some->Wants(id, false, 0);
  }
  EXPECT_NEAR(written, 1000, 150);  // five standard deviations
}

TEST_F(AccessLogTest, FailedAndOtherCallsHaveSeparateRates) {
  const auto log = Open({.sample = 1, .slow = seconds(1), .rate = 2});
  const auto count = [&log](bool failed) {
    int written = 0;
    for (uint64_t id = 0; id < 100; ++id) written += log->Wants(id, failed, 0);
    return written;
  };
  EXPECT_EQ(count(true), 40);  // a burst of 20 seconds' worth
  EXPECT_EQ(count(false), 40);
  EXPECT_EQ(log->stats().limited, 120);
  clock_.Advance(seconds(3));
  EXPECT_EQ(count(true), 6);
  EXPECT_EQ(count(false), 6);
}

// Otherwise unauthenticated clients would use up the rate of callers' failures, or fill the disk.
TEST_F(AccessLogTest, RefusedCallersAlwaysHaveASeparateLimit) {
  for (const double rate : {2.0, 0.0}) {
    const auto log = Open({.sample = 1, .slow = seconds(1), .rate = rate});
    int written = 0;
    for (int n = 0; n < 5000; ++n) written += log->WantsRefused();
    EXPECT_EQ(written, rate > 0 ? 40 : 1000);
    EXPECT_EQ(log->stats().limited, 5000 - written);
    EXPECT_TRUE(log->Wants(0, true, 0));
    clock_.Advance(seconds(1));
    written = 0;
    for (int n = 0; n < 5000; ++n) written += log->WantsRefused();
    EXPECT_EQ(written, rate > 0 ? 2 : 50);
  }
}

TEST_F(AccessLogTest, ArbitraryBytesStayWithinTheirField) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto log = Open({});
  std::vector<std::string> names = {"\n{\"code\":\"OK\"}\n", "\",\"code\":\"OK", "\x1b[2J",
                                    "\xe2\x80\xae", std::string("a\0b", 3)};
  for (int i = 0; i < 500; ++i) {
    std::string& name = names.emplace_back(random() % 40, '\0');
    for (char& c : name) {
      constexpr std::string_view kOften = "\"\\\n\r{}:,\xc2\x9b\xe2\x80\xae";
      c = random() % 2 == 0 ? kOften[random() % kOften.size()] : static_cast<char>(random());
    }
  }
  for (const std::string& name : names) {
    const std::vector<LogField> fields = {
        {"request_id", name}, {"code", "INTERNAL"}, {"n", int64_t{7}}};
    log->Write(fields);
  }
  log->Flush(std::chrono::steady_clock::now() + seconds(30));
  std::istringstream lines(test::ReadFile(path_));
  size_t n = 0;
  for (std::string line; std::getline(lines, line); ++n) {
    ASSERT_TRUE(std::none_of(line.begin(), line.end(), [](char c) {
      return static_cast<unsigned char>(c) < 0x20;
    })) << line;
    const nlohmann::json json = nlohmann::json::parse(line);
    EXPECT_EQ(json.size(), 4u) << line;
    EXPECT_EQ(json["code"], "INTERNAL") << line;
    EXPECT_EQ(json["n"], 7);
    if (n < 2) {
      EXPECT_EQ(json["request_id"], names[n]);
    }
  }
  EXPECT_EQ(n, names.size());
  EXPECT_EQ(log->stats().written, std::ssize(names));
}

}  // namespace
}  // namespace attend
