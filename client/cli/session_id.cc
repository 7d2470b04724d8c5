// SPDX-License-Identifier: Apache-2.0

#include "client/cli/session_id.h"

namespace attend::client {
namespace {

constexpr size_t kIdBytes = 16;

}  // namespace

std::string SessionIdText(const std::string& id) {
  std::string text;
  for (const char c : id) {
    for (const int nibble : {(c >> 4) & 15, c & 15}) text += "0123456789abcdef"[nibble];
  }
  return text;
}

std::string ParseSessionId(const std::string& text) {
  std::string id;
  for (size_t i = 0; i < text.size(); i += 2) {
    id += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return id;
}

std::string CheckSessionId(const std::string& text) {
  const bool hex = text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (hex && text.size() == 2 * kIdBytes) return "";
  return "\"" + text + "\" is not a session's id, " + std::to_string(2 * kIdBytes) +
         " hexadecimal digits";
}

}  // namespace attend::client
