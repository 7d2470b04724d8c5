// SPDX-License-Identifier: Apache-2.0

#include "server/log/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/sink.h>

#include <utility>

#include "server/log/last_lines.h"

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

// Passes complete lines to the writer's thread.
class LogLines final : public spdlog::sinks::sink {
 public:
  explicit LogLines(std::unique_ptr<LineWriter> writer) : writer_(std::move(writer)) {}

  LineWriter& writer() { return *writer_; }

  void log(const spdlog::details::log_msg& message) override {
    writer_->Push(View(message.payload));
  }
  void flush() override {}
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}

 private:
  const std::unique_ptr<LineWriter> writer_;
};

Logger::Logger(const Options& options, spdlog::sink_ptr sink, std::shared_ptr<LogLines> lines,
               std::shared_ptr<const Clock> clock)
    : spdlog::logger("attend-server", std::move(sink)),
      options_(options),
      lines_(std::move(lines)),
      clock_(std::move(clock)),
      limit_(options.rate) {
  // Messages arrive at the sinks already formatted.
  set_formatter(std::make_unique<spdlog::pattern_formatter>("%v", spdlog::pattern_time_type::utc,
                                                            std::string()));
  // spdlog's default handler writes to stderr, which may block.
  set_error_handler([](const std::string&) {});
}

void Logger::LogGathered(LogLevel level, std::string_view event, std::span<const LogField> fields,
                         std::string_view kind) {
  if (!should_log(level)) return;
  try {
    const spdlog::details::log_msg message({}, name(), level, {event.data(), event.size()});
    Write(message, fields, event, kind);
  } catch (const std::exception&) {
    // Out of memory: the operation that ran out reports it itself.
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
  const spdlog::details::log_msg message({}, name(), level, "similar lines were left out");
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
    if (lines_ == nullptr) return;
    const LineWriter::Lost lost = lines_->writer().TakeLost();
    if (lost.lines > 0) LogLost("log", lost);
  } catch (const std::exception&) {
  }
}

void Logger::LogLost(std::string_view log, const LineWriter::Lost& lost) {
  Log(LogLevel::warn, "log lines are lost",
      {{"log", log}, {"lines", lost.lines}, {"error", lost.error}}, log);
}

void Logger::WaitUntilWritten(Duration wait_max) {
  if (lines_ != nullptr) lines_->writer().Flush(std::chrono::steady_clock::now() + wait_max);
}

bool Logger::written() const { return lines_ == nullptr || lines_->writer().idle(); }

int64_t Logger::lost_lines() const { return lines_ == nullptr ? 0 : lines_->writer().stats().lost; }

void Logger::Reopen() {
  if (lines_ == nullptr || lines_->writer().path().empty()) {
    if (!std::exchange(said_no_file_, true)) {
      Log(LogLevel::info, "SIGHUP: no --log-file to reopen", {});
    }
    return;
  }
  if (const Status opened = lines_->writer().Reopen(); !opened.ok()) {
    Log(LogLevel::err, "the log file was not reopened; the old one stays in use",
        {{"error", opened.message()}});
    return;
  }
  Log(LogLevel::info, "log file reopened", {{"path", lines_->writer().path()}});
}

Result<std::shared_ptr<Logger>> MakeLogger(const LogSettings& settings) {
  LineWriter::Options options;
  options.name = "log-file";
  options.path = settings.file;
  options.linger = Duration::zero();
  LineWriter::OnLost on_lost;
  if (!settings.file.empty()) {
    // A file that accepts no lines cannot report the loss, so stderr does, at most once a second.
    on_lost = [path = settings.file, next = TimePoint()](const LineWriter::Lost& lost) mutable {
      const TimePoint now = std::chrono::steady_clock::now();
      if (now < std::exchange(next, std::max(next, now + std::chrono::seconds(1)))) return;
      WriteLastLine("attend-server: log lines are lost, log-file " + path + ": " + lost.error);
    };
  }
  Result<std::unique_ptr<LineWriter>> writer = LineWriter::Open(options, std::move(on_lost));
  if (!writer.ok()) return writer.status();
  const auto lines = std::make_shared<LogLines>(std::move(*writer));
  auto logger = std::make_shared<Logger>(settings.options, lines, lines);
  logger->set_level(settings.level);
  return logger;
}

}  // namespace attend
