// SPDX-License-Identifier: Apache-2.0

#include "client/cli/session_id.h"

#include <algorithm>

namespace attend::client {
namespace {

constexpr size_t kIdBytes = 16;

}  // namespace

std::string SessionIdText(const std::string& id, const std::string& server) {
  std::string text;
  for (const char c : id) {
    for (const int nibble : {(c >> 4) & 15, c & 15}) text += "0123456789abcdef"[nibble];
  }
  return server.empty() ? text : text + "@" + server;
}

SessionName ParseSessionId(const std::string& text) {
  SessionName name;
  const size_t end = std::min(text.find('@'), text.size());
  for (size_t i = 0; i < end; i += 2) {
    name.id += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  if (end < text.size()) name.server = text.substr(end + 1);
  return name;
}

std::string CheckSessionId(const std::string& text) {
  const std::string id = text.substr(0, text.find('@'));
  const bool hex = id.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  const bool server = id.size() == text.size() || id.size() + 1 < text.size();
  if (hex && server && id.size() == 2 * kIdBytes) return "";
  return "\"" + text + "\" is not a session id, must be " + std::to_string(2 * kIdBytes) +
         " hexadecimal digits, followed by @HOST:PORT if there are several servers";
}

}  // namespace attend::client
