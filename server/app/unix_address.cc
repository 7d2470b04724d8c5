// SPDX-License-Identifier: Apache-2.0

#include "server/app/unix_address.h"

#include <array>
#include <cctype>
#include <cstdio>
#include <string_view>

namespace attend {
namespace {

constexpr std::string_view kPrefix = "unix:";
constexpr std::string_view kTenant = "?tenant=";

}  // namespace

Result<UnixAddress> ParseUnixAddress(const std::string& address) {
  if (!address.starts_with(kPrefix)) return InvalidArgument("it must begin with unix:");
  const std::string rest = address.substr(kPrefix.size());
  const size_t query = rest.find('?');
  const UnixAddress parsed{rest.substr(0, query),
                           query == std::string::npos || rest.size() < query + kTenant.size()
                               ? ""
                               : rest.substr(query + kTenant.size())};
  if (parsed.path.empty()) return InvalidArgument("it has no path");
  if (query != std::string::npos &&
      (rest.compare(query, kTenant.size(), kTenant) != 0 || parsed.tenant.empty())) {
    return InvalidArgument("after its path may come ?tenant=NAME only");
  }
  return parsed;
}

std::string PeerOfPath(const std::string& path) {
  // As gRPC writes the paths of URIs.
  constexpr std::string_view kPlain = "-._~!$&'()*+,;=:@/";
  std::string peer(kPrefix);
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 128 && std::isalnum(byte) != 0) || kPlain.find(c) != std::string_view::npos) {
      peer += c;
      continue;
    }
    std::array<char, 4> escaped;
    std::snprintf(escaped.data(), escaped.size(), "%%%02X", byte);
    peer += escaped.data();
  }
  return peer;
}

std::map<std::string, std::string, std::less<>> TenantsOfPeers(const Config& config) {
  std::map<std::string, std::string, std::less<>> tenants;
  for (const std::string& address : config.listen) {
    const Result<UnixAddress> parsed = ParseUnixAddress(address);
    if (parsed.ok() && !parsed->tenant.empty()) tenants[PeerOfPath(parsed->path)] = parsed->tenant;
  }
  return tenants;
}

}  // namespace attend
