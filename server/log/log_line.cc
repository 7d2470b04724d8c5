// SPDX-License-Identifier: Apache-2.0

#include "server/log/log_line.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <type_traits>

#include "server/util/utf8.h"

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

// What a reader would not see, or what would change how the rest of the line is seen.
bool IsHidden(uint32_t code) {
  struct Range {
    uint32_t first, last;
  };
  constexpr Range kHidden[] = {
      {0x0, 0x1f},      {0x7f, 0x9f},        // control characters
      {0xad, 0xad},     {0x61c, 0x61c},      // soft hyphen; Arabic letter mark
      {0x200b, 0x200f}, {0x2028, 0x202e},    // no width, direction; line separators, direction
      {0x2060, 0x206f}, {0xfe00, 0xfe0f},    // invisible operators, direction; variants
      {0xfeff, 0xfeff}, {0xfff0, 0xfffb},    // byte order mark; annotations
      {0xfffe, 0xffff}, {0xe0000, 0xe0fff},  // noncharacters; tags, variants
  };
  for (const Range& range : kHidden) {
    if (code >= range.first && code <= range.last) return true;
  }
  return false;
}

void AppendEscape(LogFormat format, uint32_t code, std::string& out) {
  const auto unit = [&out](const char* form, uint32_t value) {
    fmt::format_to(std::back_inserter(out), fmt::runtime(form), value);
  };
  if (code < 0x10000) return unit("\\u{:04x}", code);
  if (format == LogFormat::kText) return unit("\\U{:08x}", code);
  unit("\\u{:04x}", 0xd800 + ((code - 0x10000) >> 10));
  unit("\\u{:04x}", 0xdc00 + ((code - 0x10000) & 0x3ff));
}

std::string_view Cut(std::string_view text) {
  if (text.size() <= kLogTextBytesMax) return text;
  size_t end = kLogTextBytesMax - kCutMark.size();
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

// `quoted`: what stands between quotes, where a quote or backslash is escaped.
void AppendText(LogFormat format, bool quoted, std::string_view text, std::string& out) {
  const std::string_view kept = Cut(text);
  for (size_t at = 0; at < kept.size();) {
    const Character character = FirstOf(kept.substr(at));
    if (character.bytes == 0) {
      const auto byte = static_cast<unsigned char>(kept[at++]);
      out += format == LogFormat::kJson ? "\\ufffd" : fmt::format("\\x{:02x}", byte);
      continue;
    }
    if (character.code == '\n') {
      out += "\\n";
    } else if (IsHidden(character.code)) {
      AppendEscape(format, character.code, out);
    } else {
      if (quoted && (character.code == '"' || character.code == '\\')) out += '\\';
      out += kept.substr(at, character.bytes);
    }
    at += character.bytes;
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
          // JSON knows finite numbers alone.
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

// What follows the time.
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
