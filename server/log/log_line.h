// SPDX-License-Identifier: Apache-2.0
//
// A log line as text or JSON. Pure. Lines are safe to feed with a client's bytes: each is one line,
// what a value says cannot be taken for another field, and nothing in it moves a terminal's cursor
// or turns its text around.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

namespace attend {

enum class LogFormat { kText, kJson };

// {"id", request.id}: a name of [a-z_] and what it is. Text is only looked at while the line is
// made.
struct LogField {
  std::string_view name;
  std::variant<std::string_view, int64_t, uint64_t, double, bool> value;
};
using LogFields = std::initializer_list<LogField>;

// Longer values and messages are cut between characters and marked: no line is without bound.
inline constexpr size_t kLogTextBytesMax = 2048;

struct LogHead {
  std::chrono::system_clock::time_point time;
  std::string_view level;
  size_t thread = 0;
};

// With its newline.
//   2024-05-06T07:08:09.123456Z warn request failed id=7 code="UNAVAILABLE"
//   {"time":"2024-05-06T07:08:09.123456Z","level":"warn","thread":3,"message":"request failed",
//    "id":7,"code":"UNAVAILABLE"}
// Fields must not be called as the first four keys are. In text, strings stand in quotes, numbers
// and true and false do not. Control characters, line separators, invisible marks and those that
// turn the direction of text are escaped in both forms, as \u009b; a byte that is no UTF-8 is \xff
// in text and U+FFFD in JSON.
std::string FormatLogLine(LogFormat format, const LogHead& head, std::string_view message,
                          LogFields fields);

}  // namespace attend
