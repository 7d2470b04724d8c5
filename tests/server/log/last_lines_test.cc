// SPDX-License-Identifier: Apache-2.0
//
// Lines logged just before a process ends, whatever ends it, and readers that do not read.

#include "server/log/last_lines.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "server/util/unique_fd.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

using std::chrono::seconds;
using test::ReadFile;
using test::TemporaryDirectory;

constexpr int kLines = 5000;

// Several threads log at once, and then the process ends.
void LogAndEnd(const std::string& path, int signal) {
  PrepareWrites();
  LogSettings settings;
  settings.file = path;
  const auto logger = MakeLogger(settings);
  WriteLogOnCrash(logger->get());
  for (int i = 0; i < kLines; ++i) (*logger)->info("line {} {}", i, std::string(500, 'x'));
  if (signal == SIGABRT) std::abort();
  raise(signal);
}

TEST(LastLinesDeathTest, LoggedLinesAreWrittenAfterACrash) {
  GTEST_FLAG_SET(death_test_style, "fast");
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    const TemporaryDirectory folder;
    const std::string path = folder.path() / "log";
    EXPECT_EXIT(LogAndEnd(path, signal), ::testing::KilledBySignal(signal), "");
    const std::string text = ReadFile(path);
    EXPECT_NE(text.find("line " + std::to_string(kLines - 1) + " "), std::string::npos)
        << text.size() << " bytes";
  }
}

// A process whose log is a full pipe still ends by its signal.
TEST(LastLinesDeathTest, AStuckReaderDoesNotDelayACrash) {
  GTEST_FLAG_SET(death_test_style, "fast");
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const UniqueFd reader(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EXIT(LogAndEnd(path, SIGSEGV), ::testing::KilledBySignal(SIGSEGV), "");
}

// Stderr is a full pipe without reads, or one whose reader has gone.
void WriteLastLineTo(bool closed) {
  PrepareWrites();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::_Exit(3);
  dup2(ends[1], STDERR_FILENO);
  if (closed) close(ends[0]);
  for (int i = 0; !closed && i < 3; ++i) WriteLastLine(std::string(60'000, 'x'));
  WriteLastLine("the end");
  std::_Exit(0);
}

TEST(LastLinesDeathTest, ALastLineDoesNotWaitForItsReader) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(WriteLastLineTo(false), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(WriteLastLineTo(true), ::testing::ExitedWithCode(0), "");
}

void OpenAfterClosedStreams() {
  close(STDOUT_FILENO);
  close(STDERR_FILENO);
  PrepareWrites();
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::_Exit(file.get() > STDERR_FILENO ? 0 : 3);
}

TEST(LastLinesDeathTest, AClosedStandardStreamsNumberIsNotReused) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(OpenAfterClosedStreams(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace attend
