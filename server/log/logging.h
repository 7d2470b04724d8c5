// SPDX-License-Identifier: Apache-2.0
//
// The server's log: one line per message, as text or JSON (log_line.h), to stderr or a file, by a
// thread of its own (line_writer.h), so that no thread that logs waits for a disk or a reader.
// Warnings and errors are limited per kind (log_limit.h), so the log grows slowly whatever clients
// do.

#pragma once

#include <spdlog/logger.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/line_writer.h"
#include "server/log/log_limit.h"
#include "server/log/log_line.h"

namespace attend {

using LogLevel = spdlog::level::level_enum;

// The names that --log-level takes.
std::string_view LogLevelName(LogLevel level);
std::optional<LogLevel> ParseLogLevel(std::string_view name);

class LogLines;  // the sink made by MakeLogger

// An spdlog logger with fields. Its info(), warn() etc. write lines without fields, for messages
// about the server itself; warnings and errors among them are one kind per level. Thread-safe,
// except the constructor. Nothing throws: a line that cannot be written is lost.
class Logger final : public spdlog::logger {
 public:
  struct Options {
    LogFormat format = LogFormat::kText;
    double rate = 0;  // lines per second of each kind of warning and error; 0: no limit
  };

  // `lines` is the same object as `sink`, or null.
  Logger(const Options& options, spdlog::sink_ptr sink, std::shared_ptr<LogLines> lines = nullptr,
         std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>());

  // `event` is a fixed text that says what happened; `fields` has the details. Warnings and errors
  // with the same event and `kind` share a limit.
  void Log(LogLevel level, std::string_view event, LogFields fields, std::string_view kind = {}) {
    LogGathered(level, event, fields, kind);
  }
  // Logs at `info` whatever the level is set to, for events that must leave a trace.
  void LogAlways(std::string_view event, LogFields fields);
  // Like Log, with fields collected at run time.
  void LogGathered(LogLevel level, std::string_view event, std::span<const LogField> fields,
                   std::string_view kind = {});

  // Warns that lines of `log` were lost.
  void LogLost(std::string_view log, const LineWriter::Lost& lost);

  // Logs how many lines were suppressed, of kinds that are quiet again or of every kind (`all`),
  // and how many were lost, once writing works again. Call it periodically and at the end.
  void SayLeftOut(bool all = false);
  // Lines suppressed since the last call.
  int64_t TakeLeftOutCount() { return left_out_.exchange(0, std::memory_order_relaxed); }

  // Reopens --log-file after a rotation; on failure the old file stays in use. Logs the outcome.
  // One thread at a time.
  void Reopen();

  // Waits until the lines are written or lost, at most `wait_max`.
  void WaitUntilWritten(Duration wait_max);
  // Whether they are. Lock-free, for signal handlers.
  bool written() const;
  // Lines lost because the reader or disk was slow, full or gone.
  int64_t lost_lines() const;

 private:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void Write(const spdlog::details::log_msg& message, std::span<const LogField> fields,
             std::string_view event, std::string_view kind);
  void WriteLine(const spdlog::details::log_msg& message, std::span<const LogField> fields);
  void WriteLeftOut(LogLevel level, const LogLimit::LeftOut& left_out);

  const Options options_;
  const std::shared_ptr<LogLines> lines_;
  const std::shared_ptr<const Clock> clock_;
  Mutex mutex_;
  LogLimit limit_ ATTEND_GUARDED_BY(mutex_);
  std::atomic<int64_t> left_out_{0};
  bool said_no_file_ = false;
};

struct LogSettings {
  LogLevel level = LogLevel::info;
  std::string file;  // empty: stderr
  Logger::Options options;
};

// An error if the log file cannot be opened. Its folder must exist.
Result<std::shared_ptr<Logger>> MakeLogger(const LogSettings& settings);

}  // namespace attend
