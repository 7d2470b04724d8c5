// SPDX-License-Identifier: Apache-2.0

#include "server/logging.h"

#include <spdlog/formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

namespace attend {
namespace {

// 2024-05-06T07:08:09.123456Z
std::string Timestamp(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(since - seconds);
  const std::time_t whole = static_cast<std::time_t>(seconds.count());
  std::tm utc{};
  gmtime_r(&whole, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                     micros.count());
}

std::string_view View(spdlog::string_view_t text) { return {text.data(), text.size()}; }

// As --log-level names them.
std::string_view LevelName(spdlog::level::level_enum level) {
  return level == spdlog::level::warn ? "warn" : View(spdlog::level::to_string_view(level));
}

class TextFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    std::string line = Timestamp(message.time);
    line += ' ';
    line += LevelName(message.level);
    line += ' ';
    for (const char c : View(message.payload)) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x20 || byte == 0x7f) {
        line += fmt::format("\\x{:02x}", byte);
      } else {
        line += c;
      }
    }
    line += '\n';
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<formatter> clone() const override { return std::make_unique<TextFormatter>(); }
};

class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::string line =
        fmt::format("{{\"time\":\"{}\",\"level\":\"{}\",\"thread\":{},\"message\":\"{}\"}}\n",
                    Timestamp(message.time), LevelName(message.level), message.thread_id,
                    EscapeJson(View(message.payload)));
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<formatter> clone() const override { return std::make_unique<JsonFormatter>(); }
};

}  // namespace

std::string EscapeJson(std::string_view text) {
  const std::string quoted = nlohmann::json(std::string(text))
                                 .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return quoted.substr(1, quoted.size() - 2);
}

Result<std::shared_ptr<spdlog::logger>> MakeLogger(const Config& config) {
  spdlog::sink_ptr sink;
  if (config.log_file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    try {
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(config.log_file);
    } catch (const spdlog::spdlog_ex& error) {
      return Status(Code::kNotFound, "log-file " + config.log_file + ": " + error.what());
    }
  }
  auto logger = std::make_shared<spdlog::logger>("attend-server", std::move(sink));
  logger->set_level(spdlog::level::from_str(config.log_level));
  logger->flush_on(spdlog::level::info);
  if (config.log_format == "json") {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_formatter(std::make_unique<TextFormatter>());
  }
  return logger;
}

}  // namespace attend
