// SPDX-License-Identifier: Apache-2.0
//
// Lines to files and pipes: writers never wait, a line is lost only for a reason, and every lost
// line is counted.

#include "server/log/line_writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <vector>

#include "server/log/logging.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ReadFile;
using test::TemporaryDirectory;

TimePoint Soon() { return std::chrono::steady_clock::now() + seconds(30); }

class LineWriterTest : public ::testing::Test {
 protected:
  std::unique_ptr<LineWriter> Open(const std::string& path,
                                   size_t pending_bytes_max = size_t{4} << 20) {
    Result<std::unique_ptr<LineWriter>> writer =
        LineWriter::Open({"access-log", path, pending_bytes_max},
                         [this](const auto& lost) { logger_.LogLost("access-log", lost); });
    EXPECT_TRUE(writer.ok()) << writer.status().ToString();
    return std::move(*writer);
  }
  std::string Path(const char* name) const { return folder_.path() / name; }

  const TemporaryDirectory folder_;
  std::ostringstream log_;
  Logger logger_{Logger::Options(), std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)};
};

TEST_F(LineWriterTest, LinesOfEachThreadAreWholeAndInOrder) {
  const auto writer = Open(Path("lines"));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&writer, t] {
      for (int i = 0; i < 1000; ++i) {
        writer->Push(std::to_string(t) + " " + std::to_string(i) + std::string(100, 'x') + "\n");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer->Flush(Soon());
  EXPECT_EQ(writer->stats().written, 4000);
  EXPECT_EQ(writer->stats().lost, 0);
  std::vector<int> next(4);
  std::istringstream lines(ReadFile(Path("lines")));
  for (std::string line; std::getline(lines, line);) {
    const int t = line[0] - '0';
    ASSERT_EQ(line, std::to_string(t) + " " + std::to_string(next[t]) + std::string(100, 'x'));
    ++next[t];
  }
  EXPECT_EQ(next, std::vector<int>(4, 1000));
}

TEST_F(LineWriterTest, PushedLinesAreWrittenAtTheEnd) {
  Open(Path("lines"))->Push("last\n");
  EXPECT_EQ(ReadFile(Path("lines")), "last\n");
  struct stat about {};
  ASSERT_EQ(stat(Path("lines").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0007, 0u);  // it contains client names
}

TEST_F(LineWriterTest, AMovedFileIsRecreated) {
  const auto writer = Open(Path("lines"));
  writer->Push("one\n");
  writer->Flush(Soon());
  std::filesystem::rename(Path("lines"), Path("lines.1"));
  writer->Push("two\n");
  writer->Flush(Soon());
  ASSERT_TRUE(writer->Reopen().ok());
  writer->Push("three\n");
  writer->Flush(Soon());
  EXPECT_EQ(ReadFile(Path("lines.1")), "one\ntwo\n");
  EXPECT_EQ(ReadFile(Path("lines")), "three\n");
}

TEST_F(LineWriterTest, AMissingFolderKeepsTheOldFileInUse) {
  std::filesystem::create_directory(Path("folder"));
  const auto writer = Open(Path("folder/lines"));
  std::filesystem::rename(Path("folder"), Path("moved"));
  const Status reopened = writer->Reopen();
  EXPECT_EQ(reopened.code(), Code::kNotFound);
  EXPECT_NE(reopened.message().find("access-log " + Path("folder/lines")), std::string::npos);
  writer->Push("one\n");
  writer->Flush(Soon());
  EXPECT_EQ(ReadFile(Path("moved/lines")), "one\n");
  EXPECT_FALSE(LineWriter::Open({"access-log", Path("folder/lines")}, nullptr).ok());
}

TEST_F(LineWriterTest, LinesLostToAFullDiskAreCounted) {
  const auto writer = Open("/dev/full");
  for (int i = 0; i < 100; ++i) writer->Push("a line\n");
  writer->Flush(Soon());
  EXPECT_EQ(writer->stats().written, 0);
  EXPECT_EQ(writer->stats().lost, 100);
  // The thread reports the loss a moment later.
  const TimePoint until = Soon();
  while (std::chrono::steady_clock::now() < until && log_.str().empty()) std::this_thread::yield();
  EXPECT_NE(log_.str().find("log lines are lost log=\"access-log\" lines="), std::string::npos);
  EXPECT_NE(log_.str().find("No space left on device"), std::string::npos) << log_.str();
}

// The process's file size limit stands in for a full disk: it cuts a write short in the same way.
TEST_F(LineWriterTest, ATruncatedLineDoesNotRunIntoTheNext) {
  const auto writer = Open(Path("lines"));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{25, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  writer->Push("0123456789\n0123456789\n0123456789\n");
  writer->Flush(Soon());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  writer->Push("whole\n");
  writer->Flush(Soon());
  EXPECT_EQ(ReadFile(Path("lines")), "0123456789\n0123456789\n012\nwhole\n");
  EXPECT_EQ(writer->stats().written, 3);
  EXPECT_EQ(writer->stats().lost, 1);
}

TEST_F(LineWriterTest, AStuckReaderDoesNotDelayWriters) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  const UniqueFd reader(open(Path("pipe").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  auto writer = Open(Path("pipe"), size_t{64} << 10);
  const std::string line = std::string(99, 'x') + "\n";
  constexpr int kLines = 10'000;  // a megabyte: far more than the pipe and the queue hold
  for (int i = 0; i < kLines; ++i) writer->Push(line);
  const LineWriter::Stats stats = writer->stats();
  EXPECT_GT(stats.lost, kLines / 2);
  // Lines that were not lost arrive whole.
  std::string read_back;
  std::vector<char> buffer(size_t{64} << 10);
  const TimePoint until = Soon();
  for (LineWriter::Stats now = stats;
       now.written + now.lost < kLines || std::ssize(read_back) < now.written * std::ssize(line);
       now = writer->stats()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
    const ssize_t got = read(reader.get(), buffer.data(), buffer.size());
    if (got > 0) read_back.append(buffer.data(), static_cast<size_t>(got));
  }
  EXPECT_EQ(std::ssize(read_back), writer->stats().written * std::ssize(line));
  for (size_t at = 0; at < read_back.size(); at += line.size()) {
    ASSERT_EQ(read_back.compare(at, line.size(), line), 0) << at;
  }
  // A writer ends although its reader does not read.
  for (int i = 0; i < kLines; ++i) writer->Push(line);
  writer.reset();
  EXPECT_NE(log_.str().find("log lines are lost"), std::string::npos);
}

TEST_F(LineWriterTest, ALogReportsItsOwnLossesOnceThereIsRoom) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  const UniqueFd reader(open(Path("pipe").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  const auto opened = LineWriter::Open({"log-file", Path("pipe"), size_t{64} << 10}, nullptr);
  ASSERT_TRUE(opened.ok());
  LineWriter& writer = **opened;
  const std::string line = std::string(99, 'x') + "\n";
  while (writer.stats().lost == 0) writer.Push(line);
  EXPECT_EQ(writer.TakeLost().lines, 0) << "there is no room to say so";
  EXPECT_FALSE(writer.idle());
  std::vector<char> buffer(size_t{64} << 10);
  const TimePoint until = Soon();
  while (!writer.idle()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
    (void)!read(reader.get(), buffer.data(), buffer.size());
  }
  const LineWriter::Lost lost = writer.TakeLost();
  EXPECT_EQ(lost.lines, writer.stats().lost);
  EXPECT_EQ(lost.error, "lines arrive faster than they can be written");
  EXPECT_EQ(writer.TakeLost().lines, 0) << "once is enough";
}

TEST_F(LineWriterTest, AReaderThatHasGoneDoesNotRaiseASignal) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  UniqueFd reader(open(Path("pipe").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  const auto writer = Open(Path("pipe"));
  reader.Reset();
  writer->Push("a line\n");
  writer->Flush(Soon());
  EXPECT_EQ(writer->stats().lost, 1);
}

}  // namespace
}  // namespace attend
