// SPDX-License-Identifier: Apache-2.0

#include "client/call/token.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string_view>

#include "client/call/server_address.h"

namespace attend::client {
namespace {

constexpr size_t kTokenBytesMin = 16;
constexpr size_t kTokenBytesMax = 512;

// "127.0.0.1:80", "[::1]:80" or "localhost:80".
bool IsLoopback(std::string_view address) {
  std::string host(address.substr(0, address.rfind(':')));
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host == "localhost") return true;
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

// "a line break", "a space" or "byte 0xc3", for characters that a token cannot have.
std::string NameOf(char c) {
  if (c == '\n') return "a line break";
  if (c == ' ') return "a space";
  char text[16];
  std::snprintf(text, sizeof(text), "byte 0x%02x", static_cast<unsigned char>(c));
  return text;
}

}  // namespace

Result<std::string> TokenOf(const std::string& given) {
  std::string token = given;
  std::string where = "token";
  if (token.empty()) {
    const char* const variable = std::getenv(kTokenVariable);
    if (variable == nullptr) return token;
    token = variable;
    where = kTokenVariable;
    if (token.empty()) return token;
  }
  const auto wrong = std::ranges::find_if_not(token, [](char c) { return '!' <= c && c <= '~'; });
  if (wrong != token.end()) {
    return InvalidArgument(
        where + " has " + NameOf(*wrong) + " at character " +
        std::to_string(wrong - token.begin() + 1) + " of " + std::to_string(token.size()) +
        ", must be visible ASCII only; token_file and --token-file read a file's first line");
  }
  if (kTokenBytesMin <= token.size() && token.size() <= kTokenBytesMax) return token;
  return InvalidArgument(where + " has " + std::to_string(token.size()) +
                         " characters, must have " + std::to_string(kTokenBytesMin) + " to " +
                         std::to_string(kTokenBytesMax));
}

bool IsOnThisHost(const std::string& target) {
  std::string_view rest = target;
  if (IsUnixTarget(rest)) return true;
  for (const std::string_view scheme : {"ipv4:", "ipv6:", "dns:"}) {
    if (!rest.starts_with(scheme)) continue;
    rest.remove_prefix(scheme.size());
    break;
  }
  rest.remove_prefix(std::min(rest.find_first_not_of('/'), rest.size()));  // dns:///localhost:1
  while (true) {  // ipv4: and ipv6: accept lists
    const size_t comma = rest.find(',');
    if (!IsLoopback(rest.substr(0, comma))) return false;
    if (comma == std::string_view::npos) return true;
    rest.remove_prefix(comma + 1);
  }
}

Status CheckTokenStays(const std::string& token, const std::string& target) {
  if (token.empty() || IsOnThisHost(target)) return Status();
  return InvalidArgument("the token would go to " + target +
                         " in the clear: without TLS it is sent only to loopback and Unix sockets");
}

Result<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  // No more of a long line is read than what is refused.
  for (char c; token.size() <= 2 * kTokenBytesMax && file.get(c) && c != '\n';) token += c;
  while (!token.empty() && (token.back() == '\r' || token.back() == ' ')) token.pop_back();
  if (token.empty()) {
    return InvalidArgument("token file " + path + " cannot be read, or its first line is empty");
  }
  const Result<std::string> checked = TokenOf(token);
  if (!checked.ok()) {
    return InvalidArgument("token file " + path + ": " + checked.status().message());
  }
  return token;
}

}  // namespace attend::client
