// SPDX-License-Identifier: Apache-2.0
//
// Numbers in settings. Pure.

#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace attend {

// Parses all of `text` as a number; empty if it is not one. `base`, for integers only, is as in
// std::from_chars.
template <class T, class... Base>
std::optional<T> ParseNumber(std::string_view text, Base... base) {
  T value{};
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value, base...);
  return error == std::errc() && end == last ? std::optional(value) : std::nullopt;
}

}  // namespace attend
