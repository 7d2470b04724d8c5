// SPDX-License-Identifier: Apache-2.0
//
// Counts, numbers and possessives in messages. Pure.

#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

// "1 layer", "2 layers".
inline std::string Counted(int64_t count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

// With as many digits as tell it from all others of its type: "0.5", "1e-45", "nan".
template <std::floating_point Number>
std::string NumberText(Number number) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), number).ptr);
}

// "K's", "the sessions'".
inline std::string Possessive(std::string_view name) {
  return std::string(name) + (name.ends_with('s') ? "'" : "'s");
}

}  // namespace attend
