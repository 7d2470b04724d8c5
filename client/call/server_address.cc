// SPDX-License-Identifier: Apache-2.0

#include "client/call/server_address.h"

#include <arpa/inet.h>

#include <charconv>
#include <optional>
#include <vector>

namespace attend::client {
namespace {

bool IsIpv4(const std::string& host) {
  in_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1;
}

bool IsIpv6(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

constexpr std::string_view kTcpSchemes[] = {"dns:", "ipv4:", "ipv6:"};

std::string_view WithoutScheme(std::string_view target) {
  for (const std::string_view scheme : kTcpSchemes) {
    if (target.starts_with(scheme)) return target.substr(scheme.size());
  }
  return target;
}

// One address: HOST:PORT.
Result<std::string> OneTarget(const std::string& server) {
  const auto refuse = [&](const std::string& why) {
    return InvalidArgument("server is \"" + server.substr(0, 200) + "\": " + why);
  };
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

Result<std::string> ListTarget(const std::string& servers) {
  const auto refuse = [&](const std::string& why) {
    return InvalidArgument("server is \"" + servers.substr(0, 200) + "\": " + why);
  };
  std::string list;
  bool ipv4 = false;
  for (size_t begin = 0; begin <= servers.size();) {
    const size_t end = std::min(servers.find(',', begin), servers.size());
    const std::string part = servers.substr(begin, end - begin);
    if (part.empty()) return refuse("has an empty entry before or after a comma");
    const Result<std::string> one = IsUnixTarget(part) ? part : OneTarget(part);
    if (!one.ok()) return one;
    const std::string host = IsUnixTarget(part) ? part : ParseTarget(*one).host;
    if (!IsIpv4(host) && !IsIpv6(host)) {
      return refuse("a list must have IP addresses, and " + host +
                    " is not one; dns:///NAME:PORT stands for all addresses of a name");
    }
    if (list.empty()) ipv4 = IsIpv4(host);
    if (IsIpv4(host) != ipv4) return refuse("a list must be of IPv4 or of IPv6 addresses");
    list += (list.empty() ? "" : ",") + *one;
    begin = end + 1;
  }
  return (ipv4 ? "ipv4:" : "ipv6:") + list;
}

}  // namespace

Result<std::string> ServerTarget(const std::string& server) {
  if (server.empty()) return InvalidArgument("server is empty, must be HOST:PORT or unix:PATH");
  for (const char* scheme : {"unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:"}) {
    if (server.starts_with(scheme)) return server;
  }
  return server.find(',') == std::string::npos ? OneTarget(server) : ListTarget(server);
}

HostAndPort ParseTarget(const std::string& target) {
  std::string_view rest = WithoutScheme(target);
  // dns://AUTHORITY/HOST:PORT; without an authority, one slash or three.
  if (rest.starts_with("//")) rest.remove_prefix(std::min(rest.find('/', 2), rest.size()));
  if (rest.starts_with('/')) rest.remove_prefix(1);
  rest = rest.substr(0, rest.find(','));
  const size_t colon = rest.rfind(':');
  HostAndPort parsed{std::string(rest.substr(0, colon)), ""};
  if (colon != std::string_view::npos) parsed.port = rest.substr(colon + 1);
  std::string& host = parsed.host;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return parsed;
}

bool IsList(const std::string& target) {
  return (target.starts_with("ipv4:") || target.starts_with("ipv6:")) &&
         target.find(',') != std::string::npos;
}

bool MayBeSeveral(const std::string& target) {
  if (IsUnixTarget(target)) return false;
  if (target.starts_with("ipv4:") || target.starts_with("ipv6:")) return IsList(target);
  const std::string host = ParseTarget(target).host;
  return host != "localhost" && !IsIpv4(host) && !IsIpv6(host.substr(0, host.find('%')));
}

std::string ServerOfPeer(std::string_view peer) {
  std::string server(WithoutScheme(peer));
  // gRPC percent-encodes brackets and the % of an IPv6 zone, as in a URI.
  for (const auto& [escaped, plain] : {std::pair{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}}) {
    const size_t at = server.find(escaped);
    if (at != std::string::npos) server.replace(at, 3, plain);
  }
  return server;
}

bool IsUnixTarget(std::string_view target) {
  return target.starts_with("unix:") || target.starts_with("unix-abstract:");
}

}  // namespace attend::client
