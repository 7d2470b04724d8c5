// SPDX-License-Identifier: Apache-2.0

#include "server/util/byte_size.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace attend {
namespace {

constexpr std::string_view kUnits = "KMGT";

// Power of 1024 of a lower-case unit; -1 if there is no such unit.
int PowerOf(std::string_view unit) {
  if (unit.empty() || unit == "b") return 0;
  const size_t at = kUnits.find(static_cast<char>(std::toupper(unit[0])));
  const std::string_view rest = unit.substr(1);
  if (at == kUnits.npos || !(rest.empty() || rest == "b" || rest == "ib")) return -1;
  return static_cast<int>(at) + 1;
}

}  // namespace

Result<int64_t> ParseByteSize(std::string_view text) {
  const auto wrong = [text](const char* why) {
    return InvalidArgument("\"" + std::string(text.substr(0, 64)) + "\" " + why);
  };
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number)) {
    return wrong("is not a number of bytes, such as 4096 or 64MiB");
  }
  if (number < 0) return wrong("must be at least 0");
  std::string unit;
  for (const char* at = end; at != text.data() + text.size(); ++at) {
    if (*at != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*at)));
  }
  const int power = PowerOf(unit);
  if (power < 0)
    return wrong(
        "has an unknown unit, must be B, KiB, MiB, GiB or TiB (or K, KB and so on, "
        "also powers of 1024)");
  const double bytes = std::ldexp(number, 10 * power);
  if (bytes >= 0x1p53) return wrong("is too large, must be below 2^53 bytes");
  return static_cast<int64_t>(std::llround(bytes));
}

std::string FormatByteSize(int64_t bytes) {
  size_t power = 0;
  while (bytes != 0 && bytes % 1024 == 0 && power < kUnits.size()) {
    bytes /= 1024;
    ++power;
  }
  const std::string number = std::to_string(bytes);
  return power == 0 ? number + "B" : number + kUnits[power - 1] + "iB";
}

std::string RoundByteSize(int64_t bytes) {
  double number = static_cast<double>(bytes);
  size_t power = 0;
  while (number >= 1024 && power < kUnits.size()) {
    number /= 1024;
    ++power;
  }
  if (power == 0) return FormatByteSize(bytes);
  const int digits = number < 10 ? 2 : number < 100 ? 1 : 0;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, number);
  std::string shown = text.data();
  if (digits > 0) {
    shown.erase(shown.find_last_not_of('0') + 1);
    if (shown.back() == '.') shown.pop_back();
  }
  return shown + kUnits[power - 1] + "iB";
}

}  // namespace attend
