// SPDX-License-Identifier: Apache-2.0
//
// Formats a log line as text or JSON. Pure. Safe for a client's bytes: the result is always one
// line, no value can be mistaken for another field, and nothing moves a terminal's cursor or
// reverses its text.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <variant>

namespace attend {

enum class LogFormat { kText, kJson };

// {"id", request.id}: a name of [a-z_] and a value. Text is referenced, not copied.
struct LogField {
  std::string_view name;
  std::variant<std::string_view, int64_t, uint64_t, double, bool> value;
};
using LogFields = std::initializer_list<LogField>;

// Longer values and messages are cut between characters and marked, so that lines are bounded.
inline constexpr size_t kLogTextBytesMax = 2048;

struct LogHead {
  std::chrono::system_clock::time_point time;
  std::string_view level;
  size_t thread = 0;
};

// Returns the line with its newline:
//
//   2024-05-06T07:08:09.123456Z warn request failed id=7 code="UNAVAILABLE"
//   {"time":"2024-05-06T07:08:09.123456Z","level":"warn","thread":3,"message":"request failed",
//    "id":7,"code":"UNAVAILABLE"}
//
// Fields must not have the names of the first four keys. In text, strings are quoted; numbers, true
// and false are not. Control characters, line separators, invisible characters and those that
// change text direction are escaped in both formats as \u009b; a byte that is not UTF-8 becomes
// \xff in text and U+FFFD in JSON.
std::string FormatLogLine(LogFormat format, const LogHead& head, std::string_view message,
                          std::span<const LogField> fields);
// A line of JSON with the time and these fields only, just as safe.
std::string FormatJsonRecord(std::chrono::system_clock::time_point time,
                             std::span<const LogField> fields);

}  // namespace attend
