// SPDX-License-Identifier: Apache-2.0
//
// Log lines: safe and structured whatever their values, bounded in number, written to a file that
// may be moved away.

#include "server/log/logging.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "server/util/byte_size.h"
#include "server/util/unique_fd.h"
#include "server/util/whole_file.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ReadFile;
using test::TemporaryDirectory;

std::string Line(LogFormat format, std::string_view message, LogFields fields) {
  const LogHead head{std::chrono::system_clock::time_point(milliseconds(1'714'979'289'123)), "warn",
                     3};
  return FormatLogLine(format, head, message, fields);
}

std::string TextOf(std::string_view value) {
  const std::string line = Line(LogFormat::kText, "event", {{"id", value}});
  const std::string before = "2024-05-06T07:08:09.123000Z warn event id=";
  EXPECT_TRUE(line.starts_with(before)) << line;
  EXPECT_TRUE(line.ends_with("\n")) << line;
  return line.substr(before.size(), line.size() - before.size() - 1);
}

TEST(LogLineTest, FieldsAreFormattedByType) {
  const LogFields fields = {{"id", std::numeric_limits<uint64_t>::max()},
                            {"low", std::numeric_limits<int64_t>::min()},
                            {"ratio", 0.5},
                            {"bound", std::numeric_limits<double>::infinity()},
                            {"on", true},
                            {"peer", "ipv4:127.0.0.1:1"}};
  const std::string text = Line(LogFormat::kText, "request failed", fields);
  EXPECT_EQ(text,
            "2024-05-06T07:08:09.123000Z warn request failed id=18446744073709551615 "
            "low=-9223372036854775808 ratio=0.5 bound=\"inf\" on=true peer=\"ipv4:127.0.0.1:1\"\n");
  const nlohmann::json json =
      nlohmann::json::parse(Line(LogFormat::kJson, "request failed", fields));
  EXPECT_EQ(json["time"], "2024-05-06T07:08:09.123000Z");
  EXPECT_EQ(json["level"], "warn");
  EXPECT_EQ(json["thread"], 3);
  EXPECT_EQ(json["message"], "request failed");
  EXPECT_EQ(json["id"], std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(json["low"], std::numeric_limits<int64_t>::min());
  EXPECT_EQ(json["ratio"], 0.5);
  EXPECT_EQ(json["bound"], "inf");
  EXPECT_EQ(json["on"], true);
  EXPECT_EQ(json["peer"], "ipv4:127.0.0.1:1");
  EXPECT_EQ(json.size(), 10u);
}

TEST(LogLineTest, AValueCannotPoseAsAnotherField) {
  EXPECT_EQ(TextOf("x code=OK message=\"fine\""), R"("x code=OK message=\"fine\"")");
  EXPECT_EQ(TextOf("back\\slash"), R"("back\\slash")");
  EXPECT_EQ(TextOf("two\nlines\r\x1b[2J"), R"("two\nlines\u000d\u001b[2J")");
  EXPECT_EQ(TextOf(std::string_view("a\0b", 3)), R"("a\u0000b")");
  EXPECT_EQ(TextOf("\xc2\x80 \xc2\x9b \xc2\x9f \x7f"), R"("\u0080 \u009b \u009f \u007f")");  // C1
  EXPECT_EQ(TextOf("\xe2\x80\xae \xe2\x81\xa6 \xd8\x9c"), R"("\u202e \u2066 \u061c")");      // bidi
  EXPECT_EQ(TextOf("\xe2\x80\xa8 \xe2\x80\x8b"), R"("\u2028 \u200b")");
  EXPECT_EQ(TextOf("\xf3\xa0\x81\x81"), R"("\U000e0041")");  // a tag
  // Invalid UTF-8: a lone byte, a truncated sequence, an overlong form, a surrogate, and a code
  // point above the last.
  EXPECT_EQ(TextOf("\xff \xe2\x82 \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80"),
            R"("\xff \xe2\x82 \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80")");
  EXPECT_EQ(TextOf("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"),
            "\"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80\"");
  // The event cannot break the line either.
  EXPECT_NE(Line(LogFormat::kText, "a\nb\x9b", {}).find("a\\nb\\x9b\n"), std::string::npos);
}

// A JSON parser gets the original value, except that invalid UTF-8 becomes replacement characters.
TEST(LogLineTest, JsonIsValidForAnyBytes) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random() % 40, '\0');
    for (char& c : bytes) {
      constexpr std::string_view kOften = "\"\\\n{}\xc2\x9b\xe2\x80\xae\xf0\x9f\xed\xa0";
      c = random() % 2 == 0 ? kOften[random() % kOften.size()] : static_cast<char>(random());
    }
    const std::string line = Line(LogFormat::kJson, bytes, {{"id", bytes}});
    ASSERT_EQ(std::count_if(line.begin(), line.end(),
                            [](char c) { return static_cast<unsigned char>(c) < 0x20; }),
              1)
        << line;
    const nlohmann::json json = nlohmann::json::parse(line);
    EXPECT_EQ(json["id"], json["message"]);
    const std::string dumped =
        nlohmann::json(bytes).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    const auto without_marks = [](std::string text) {
      for (size_t at; (at = text.find("\xef\xbf\xbd")) != std::string::npos;) text.erase(at, 3);
      return text;
    };
    EXPECT_EQ(without_marks(json["id"]),
              without_marks(nlohmann::json::parse(dumped).get<std::string>()));
  }
}

TEST(LogLineTest, LongValuesAreCut) {
  std::string umlauts;
  while (umlauts.size() <= kLogTextBytesMax) umlauts += "\xc3\xa4";
  const std::string text = TextOf(umlauts);
  EXPECT_LE(text.size(), kLogTextBytesMax + 2);
  EXPECT_TRUE(text.ends_with("\xc3\xa4...\""));
  const std::string longest(kLogTextBytesMax, 'x');
  EXPECT_EQ(TextOf(longest), "\"" + longest + "\"");
}

class LoggerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Logger> Make(double rate) {
    auto logger = std::make_unique<Logger>(Logger::Options{LogFormat::kJson, rate},
                                           std::make_shared<spdlog::sinks::ostream_sink_mt>(out_),
                                           nullptr, clock_);
    logger->set_level(LogLevel::debug);
    return logger;
  }
  // The lines since the last call.
  std::vector<nlohmann::json> Lines() {
    std::vector<nlohmann::json> lines;
    std::istringstream text(out_.str());
    out_.str("");
    for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  const std::shared_ptr<test::ManualClock> clock_ = std::make_shared<test::ManualClock>();
  std::ostringstream out_;
};

TEST_F(LoggerTest, AFloodOfOneKindIsCountedAndHidesNoOthers) {
  const auto logger = Make(1);
  for (int i = 0; i < 1000; ++i) logger->Log(LogLevel::warn, "failed", {{"n", i}}, "BAD");
  EXPECT_EQ(Lines().size(), 20u);
  EXPECT_EQ(logger->TakeLeftOutCount(), 980);
  EXPECT_EQ(logger->TakeLeftOutCount(), 0);
  logger->Log(LogLevel::warn, "failed", {}, "WORSE");
  logger->Log(LogLevel::err, "lost", {});
  EXPECT_EQ(Lines().size(), 2u);

  clock_->Advance(milliseconds(1500));
  logger->Log(LogLevel::warn, "failed", {{"n", -1}}, "BAD");
  const std::vector<nlohmann::json> lines = Lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["message"], "similar lines were left out");
  EXPECT_EQ(lines[0]["event"], "failed");
  EXPECT_EQ(lines[0]["kind"], "BAD");
  EXPECT_EQ(lines[0]["lines"], 980);
  EXPECT_EQ(lines[0]["seconds"], 1.5);
  EXPECT_EQ(lines[1]["n"], -1);
}

TEST_F(LoggerTest, SuppressedLinesAreReportedAfterTheFlood) {
  const auto logger = Make(1);
  for (int i = 0; i < 30; ++i) logger->Log(LogLevel::warn, "failed", {});
  EXPECT_EQ(Lines().size(), 20u);
  logger->SayLeftOut();
  EXPECT_EQ(Lines().size(), 0u);  // the flood may go on
  clock_->Advance(seconds(1));
  logger->SayLeftOut();
  const std::vector<nlohmann::json> lines = Lines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0]["lines"], 10);
  clock_->Advance(seconds(60));
  logger->SayLeftOut();
  EXPECT_EQ(Lines().size(), 0u);
  // At the end nothing is left unreported.
  for (int i = 0; i < 25; ++i) logger->Log(LogLevel::warn, "failed", {});
  logger->SayLeftOut(/*all=*/true);
  EXPECT_EQ(Lines().size(), 21u);
}

TEST_F(LoggerTest, AFloodOfAnHourIsBoundedByTheRate) {
  const auto logger = Make(0.5);
  for (int i = 0; i < 36'000; ++i) {
    logger->Log(LogLevel::warn, "failed", {});
    logger->warn("without fields");
    logger->Log(LogLevel::warn, "kinds without number", {}, std::to_string(i));
    clock_->Advance(milliseconds(100));
  }
  std::map<std::string, int> lines;
  for (const nlohmann::json& line : Lines()) ++lines[line["message"]];
  EXPECT_NEAR(lines["failed"], 1810, 2);
  EXPECT_NEAR(lines["without fields"], 1810, 2);
  EXPECT_LE(lines["kinds without number"], LogLimit::kKindsMax + 1810);
  EXPECT_LE(lines["similar lines were left out"], 3 * 1802);
}

TEST_F(LoggerTest, RateZeroAndLowerLevelsAreNotLimited) {
  const auto unlimited = Make(0);
  for (int i = 0; i < 100; ++i) unlimited->Log(LogLevel::warn, "failed", {});
  EXPECT_EQ(Lines().size(), 100u);
  const auto logger = Make(1);
  for (int i = 0; i < 100; ++i) logger->Log(LogLevel::info, "said", {});
  for (int i = 0; i < 100; ++i) logger->Log(LogLevel::trace, "below", {});
  EXPECT_EQ(Lines().size(), 100u);
}

TEST(LogFileTest, ALogReportsLostLinesOnceItIsWritableAgain) {
  const TemporaryDirectory directory;
  LogSettings settings;
  settings.file = directory.path() / "log";
  fs::create_symlink("/dev/full", settings.file);
  const auto logger = MakeLogger(settings);
  ASSERT_TRUE(logger.ok()) << logger.status().ToString();
  (*logger)->info("first");
  (*logger)->WaitUntilWritten(seconds(30));
  EXPECT_EQ((*logger)->lost_lines(), 1);
  (*logger)->SayLeftOut();
  (*logger)->WaitUntilWritten(seconds(30));
  EXPECT_EQ((*logger)->lost_lines(), 1) << "what says so was lost too";
  fs::remove(settings.file);
  (*logger)->Reopen();
  (*logger)->WaitUntilWritten(seconds(30));
  (*logger)->SayLeftOut();
  (*logger)->WaitUntilWritten(seconds(30));
  const std::string text = ReadFile(settings.file);
  EXPECT_NE(text.find("log lines are lost log=\"log\" lines=1 error=\"No space left on device\""),
            std::string::npos)
      << text;
}

TEST_F(LoggerTest, WithoutAFileReopeningIsReportedOnce) {
  const auto logger = Make(1);
  logger->Reopen();
  logger->Reopen();
  EXPECT_EQ(Lines().size(), 1u);
}

TEST(WholeFileTest, LinksAreNotFollowedAndNoFileIsLeftBehind) {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "ready.json";
  const fs::path victim = directory.path() / "victim";
  std::ofstream(victim) << "mine";
  fs::create_symlink(victim, path);
  fs::create_symlink(victim, path.string() + ".partial");
  ASSERT_TRUE(WriteWholeFile("ready-file", path, "{}\n").ok());
  EXPECT_EQ(ReadFile(path), "{}\n");
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_EQ(ReadFile(victim), "mine");
  EXPECT_EQ(directory.entries().size(), 3u);

  const std::string missing = directory.path() / "none" / "ready.json";
  EXPECT_EQ(CheckFolderOf("ready-file", missing).message(),
            "ready-file " + missing + ": missing folder " + (directory.path() / "none").string());
  EXPECT_TRUE(CheckFolderOf("ready-file", path).ok());
  EXPECT_TRUE(CheckFolderOf("ready-file", "ready.json").ok());
  EXPECT_FALSE(WriteWholeFile("ready-file", missing, "").ok());
}

TEST(RoundByteSizeTest, HasThreeDigits) {
  EXPECT_EQ(RoundByteSize(25276502016), "23.5GiB");
  EXPECT_EQ(RoundByteSize(0), "0B");
  EXPECT_EQ(RoundByteSize(999), "999B");
  EXPECT_EQ(RoundByteSize(1000), "1000B");
  EXPECT_EQ(RoundByteSize(int64_t{10} << 30), "10GiB");
  EXPECT_EQ(RoundByteSize(int64_t{100} << 30), "100GiB");
  EXPECT_EQ(RoundByteSize(int64_t{1} << 50), "1024TiB");
}

}  // namespace
}  // namespace attend
