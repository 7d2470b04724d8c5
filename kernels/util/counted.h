// SPDX-License-Identifier: Apache-2.0
//
// Counts and possessives in messages. Pure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

// "1 layer", "2 layers".
inline std::string Counted(int64_t count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

// "K's", "the sessions'".
inline std::string Possessive(std::string_view name) {
  return std::string(name) + (name.ends_with('s') ? "'" : "'s");
}

}  // namespace attend
