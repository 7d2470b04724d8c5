// SPDX-License-Identifier: Apache-2.0

#include "server/log/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "server/log/write_errors.h"

namespace attend {
namespace {

std::string_view View(spdlog::string_view_t text) { return {text.data(), text.size()}; }

}  // namespace

std::string_view LogLevelName(LogLevel level) {
  return level == LogLevel::warn ? "warn" : View(spdlog::level::to_string_view(level));
}

std::optional<LogLevel> ParseLogLevel(std::string_view name) {
  for (const LogLevel level : {LogLevel::trace, LogLevel::debug, LogLevel::info, LogLevel::warn,
                               LogLevel::err, LogLevel::off}) {
    if (LogLevelName(level) == name) return level;
  }
  return std::nullopt;
}

// The lock is spdlog's, which names its type.
class LogFile final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit LogFile(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  int64_t write_errors() const { return write_errors_.load(std::memory_order_relaxed); }

  // The file that now has this name, which is made if there is none.
  Status Open() {
    File file(std::fopen(path_.c_str(), "ae"));  // e: not for child processes
    if (file == nullptr) {
      return Status(Code::kNotFound,
                    "log-file " + path_ + " cannot be opened: " + std::strerror(errno));
    }
    const std::lock_guard lock(mutex_);
    file_ = std::move(file);
    return Status();
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size()) Fail();
  }
  void flush_() override {
    if (std::fflush(file_.get()) != 0) Fail();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;

  // spdlog says it on stderr, at most once a second.
  [[noreturn]] void Fail() {
    const int error = errno;
    write_errors_.fetch_add(1, std::memory_order_relaxed);
    spdlog::throw_spdlog_ex("cannot write to " + path_, error);
  }

  const std::string path_;
  File file_;
  std::atomic<int64_t> write_errors_{0};
};

int64_t CountWriteErrors(const Logger& logger) {
  int64_t count = 0;
  for (const spdlog::sink_ptr& sink : logger.sinks()) {
    if (const auto* const file = dynamic_cast<const LogFile*>(sink.get())) {
      count += file->write_errors();
    }
  }
  return count;
}

Logger::Logger(const Options& options, spdlog::sink_ptr sink, std::shared_ptr<LogFile> file,
               std::shared_ptr<const Clock> clock)
    : spdlog::logger("attend-server", std::move(sink)),
      options_(options),
      file_(std::move(file)),
      clock_(std::move(clock)),
      limit_(options.rate) {
  // Lines reach the sinks as they are written.
  set_formatter(std::make_unique<spdlog::pattern_formatter>("%v", spdlog::pattern_time_type::utc,
                                                            std::string()));
  flush_on(LogLevel::info);
}

void Logger::LogGathered(LogLevel level, std::string_view event, std::span<const LogField> fields,
                         std::string_view kind) {
  if (!should_log(level)) return;
  try {
    const spdlog::details::log_msg message({}, name(), level, {event.data(), event.size()});
    Write(message, fields, event, kind);
  } catch (const std::exception&) {
    // For want of memory: what is logged has its own way to say so.
  }
}

void Logger::LogAlways(std::string_view event, LogFields fields) {
  try {
    WriteLine({{}, name(), LogLevel::info, {event.data(), event.size()}}, fields);
  } catch (const std::exception&) {
  }
}

void Logger::sink_it_(const spdlog::details::log_msg& message) {
  Write(message, {}, "other lines", LogLevelName(message.level));
}

void Logger::Write(const spdlog::details::log_msg& message, std::span<const LogField> fields,
                   std::string_view event, std::string_view kind) {
  if (message.level >= LogLevel::warn) {
    LogLimit::Verdict verdict;
    {
      const MutexLock lock(mutex_);
      verdict = limit_.Take(event, kind, clock_->Now());
    }
    if (!verdict.write) {
      left_out_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (verdict.before.lines > 0) WriteLeftOut(message.level, verdict.before);
  }
  WriteLine(message, fields);
}

void Logger::WriteLine(const spdlog::details::log_msg& message, std::span<const LogField> fields) {
  const LogHead head{message.time, LogLevelName(message.level), message.thread_id};
  const std::string line = FormatLogLine(options_.format, head, View(message.payload), fields);
  spdlog::details::log_msg whole(message);
  whole.payload = line;
  spdlog::logger::sink_it_(whole);
}

void Logger::WriteLeftOut(LogLevel level, const LogLimit::LeftOut& left_out) {
  const spdlog::details::log_msg message({}, name(), level, "more lines like this were left out");
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(left_out.over);
  const LogFields fields = {{"event", left_out.event},
                            {"kind", left_out.kind},
                            {"lines", left_out.lines},
                            {"seconds", static_cast<double>(millis.count()) / 1000}};
  WriteLine(message, fields);
}

void Logger::SayLeftOut(bool all) {
  try {
    std::vector<LogLimit::LeftOut> said;
    {
      const MutexLock lock(mutex_);
      said = limit_.TakeLeftOut(clock_->Now(), all);
    }
    for (const LogLimit::LeftOut& left_out : said) WriteLeftOut(LogLevel::warn, left_out);
  } catch (const std::exception&) {
  }
}

void Logger::Reopen() {
  if (file_ == nullptr) {
    if (!std::exchange(said_no_file_, true)) {
      Log(LogLevel::info, "SIGHUP: there is no --log-file to reopen", {});
    }
    return;
  }
  flush();
  if (const Status opened = file_->Open(); !opened.ok()) {
    Log(LogLevel::err, "the log file was not reopened; the old one stays in use",
        {{"error", opened.message()}});
    return;
  }
  Log(LogLevel::info, "log file reopened", {{"path", file_->path()}});
}

Result<std::shared_ptr<Logger>> MakeLogger(const LogSettings& settings) {
  std::shared_ptr<LogFile> file;
  spdlog::sink_ptr sink;
  if (settings.file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    file = std::make_shared<LogFile>(settings.file);
    ATTEND_RETURN_IF_ERROR(file->Open());
    sink = file;
  }
  auto logger = std::make_shared<Logger>(settings.options, std::move(sink), std::move(file));
  logger->set_level(settings.level);
  return logger;
}

}  // namespace attend
