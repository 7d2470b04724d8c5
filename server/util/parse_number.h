// SPDX-License-Identifier: Apache-2.0
//
// Numbers as people write them in settings. Pure.

#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace attend {

// The number that `text` is, all of it; `base`, of whole numbers alone, as std::from_chars has it.
template <class T, class... Base>
std::optional<T> ParseNumber(std::string_view text, Base... base) {
  T value{};
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value, base...);
  return error == std::errc() && end == last ? std::optional(value) : std::nullopt;
}

}  // namespace attend
