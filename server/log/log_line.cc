// SPDX-License-Identifier: Apache-2.0

#include "server/log/log_line.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <type_traits>

#include "kernels/util/printable.h"
#include "kernels/util/utf8.h"

namespace attend {
namespace {

constexpr std::string_view kCutMark = "...";

// 2024-05-06T07:08:09.123456Z
void AppendTime(std::chrono::system_clock::time_point time, std::string& out) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(time);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(time - seconds);
  fmt::format_to(std::back_inserter(out), "{:%Y-%m-%dT%H:%M:%S}.{:06}Z",
                 fmt::gmtime(std::chrono::system_clock::to_time_t(seconds)), micros.count());
}

std::string_view Cut(std::string_view text) {
  if (text.size() <= kLogTextBytesMax) return text;
  size_t end = kLogTextBytesMax - kCutMark.size();
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

// Escapes for the inside of a JSON string.
void AppendJsonText(std::string_view text, std::string& out) {
  const auto unit = [&out](uint32_t value) {
    fmt::format_to(std::back_inserter(out), "\\u{:04x}", value);
  };
  while (!text.empty()) {
    const Character first = FirstOf(text);
    const std::string_view bytes = text.substr(0, first.bytes == 0 ? 1 : first.bytes);
    text.remove_prefix(bytes.size());
    if (first.bytes == 0) {
      unit(0xfffd);
    } else if (first.code == '\n') {
      out += "\\n";
    } else if (IsHidden(first.code) && first.code < 0x10000) {
      unit(first.code);
    } else if (IsHidden(first.code)) {
      unit(0xd800 + ((first.code - 0x10000) >> 10));
      unit(0xdc00 + ((first.code - 0x10000) & 0x3ff));
    } else {
      if (first.code == '"' || first.code == '\\') out += '\\';
      out += bytes;
    }
  }
}

// `quoted`: the text is inside quotes, as always in JSON.
void AppendText(LogFormat format, bool quoted, std::string_view text, std::string& out) {
  const std::string_view kept = Cut(text);
  if (format == LogFormat::kJson) {
    AppendJsonText(kept, out);
  } else {
    AppendPrintable(kept, quoted, &out);
  }
  if (kept.size() < text.size()) out += kCutMark;
}

void AppendQuoted(LogFormat format, std::string_view text, std::string& out) {
  out += '"';
  AppendText(format, true, text, out);
  out += '"';
}

void AppendValue(LogFormat format, const LogField& field, std::string& out) {
  std::visit(
      [&](const auto& value) {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string_view>) {
          AppendQuoted(format, value, out);
        } else if constexpr (std::is_same_v<Value, double>) {
          // JSON has no infinities or NaN.
          const std::string number = fmt::format("{}", value);
          if (std::isfinite(value)) {
            out += number;
          } else {
            AppendQuoted(format, number, out);
          }
        } else {
          fmt::format_to(std::back_inserter(out), "{}", value);
        }
      },
      field.value);
}

// The fields after the time, and the closing brace.
void AppendJsonFields(std::span<const LogField> fields, std::string& out) {
  for (const LogField& field : fields) {
    fmt::format_to(std::back_inserter(out), ",\"{}\":", field.name);
    AppendValue(LogFormat::kJson, field, out);
  }
  out += '}';
}

}  // namespace

std::string FormatLogLine(LogFormat format, const LogHead& head, std::string_view message,
                          std::span<const LogField> fields) {
  std::string line;
  if (format == LogFormat::kText) {
    AppendTime(head.time, line);
    fmt::format_to(std::back_inserter(line), " {} ", head.level);
    AppendText(format, false, message, line);
    for (const LogField& field : fields) {
      fmt::format_to(std::back_inserter(line), " {}=", field.name);
      AppendValue(format, field, line);
    }
  } else {
    line += "{\"time\":\"";
    AppendTime(head.time, line);
    fmt::format_to(std::back_inserter(line), R"(","level":"{}","thread":{},"message":)", head.level,
                   head.thread);
    AppendQuoted(format, message, line);
    AppendJsonFields(fields, line);
  }
  line += '\n';
  return line;
}

std::string FormatJsonRecord(std::chrono::system_clock::time_point time,
                             std::span<const LogField> fields) {
  std::string line = "{\"time\":\"";
  AppendTime(time, line);
  line += '"';
  AppendJsonFields(fields, line);
  line += '\n';
  return line;
}

}  // namespace attend
