// SPDX-License-Identifier: Apache-2.0

#include "client/call/server_address.h"

#include <arpa/inet.h>

#include <charconv>
#include <optional>

namespace attend::client {
namespace {

bool IsIpv6(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

}  // namespace

Result<std::string> ServerTarget(const std::string& server) {
  const auto refuse = [&](const std::string& why) {
    return InvalidArgument("server is \"" + server.substr(0, 200) + "\": " + why);
  };
  if (server.empty()) return InvalidArgument("server is empty, must be HOST:PORT or unix:PATH");
  for (const char* scheme : {"unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:"}) {
    if (server.starts_with(scheme)) return server;
  }
  if (const size_t at = server.find("://"); at != std::string::npos) {
    return refuse("must be HOST:PORT or unix:PATH, without " + server.substr(0, at + 3));
  }
  if (server.find_first_of(" \t\r\n/@?#") != std::string::npos) {
    return refuse("must be HOST:PORT or unix:PATH");
  }
  std::string host = server;
  std::optional<std::string> port;
  const size_t colon = server.rfind(':');
  if (server.front() == '[') {
    const size_t end = server.find(']');
    host = server.substr(1, end - 1);
    if (end == std::string::npos || !IsIpv6(host.substr(0, host.find('%')))) {
      return refuse("must have an IPv6 address between [ and ]");
    }
    if (end + 1 < server.size()) {
      if (server[end + 1] != ':') return refuse("must be [IPV6]:PORT");
      port = server.substr(end + 2);
    }
    host = "[" + host + "]";
  } else if (IsIpv6(server)) {
    host = "[" + server + "]";
  } else if (colon != std::string::npos) {
    host = server.substr(0, colon);
    port = server.substr(colon + 1);
    if (host.find(':') != std::string::npos) return refuse("an IPv6 address must be in [ ]");
  }
  if (host.empty()) return refuse("the host is missing");
  int number = kDefaultPort;
  if (port) {
    const char* const end = port->data() + port->size();
    const auto [parsed, error] = std::from_chars(port->data(), end, number);
    if (error != std::errc() || parsed != end || number < 1 || number > 65535) {
      return refuse("port \"" + *port + "\" must be a number in [1, 65535]");
    }
  }
  return host + ":" + std::to_string(number);
}

bool IsUnixTarget(std::string_view target) {
  return target.starts_with("unix:") || target.starts_with("unix-abstract:");
}

}  // namespace attend::client
