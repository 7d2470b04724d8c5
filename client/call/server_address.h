// SPDX-License-Identifier: Apache-2.0
//
// Parses server addresses as users write them. Pure.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr int kDefaultPort = 8001;

// gRPC's target for HOST, HOST:PORT, [IPV6]:PORT, IPV6, a comma-separated list of these with IP
// addresses of one family, unix:PATH, or a name in gRPC's own syntax (dns:, ipv4:, ipv6:,
// unix-abstract:). Without a port: kDefaultPort. INVALID_ARGUMENT for anything else, which gRPC
// would resolve as a host name.
Result<std::string> ServerTarget(const std::string& server);

// Whether a target of ServerTarget is a Unix socket.
bool IsUnixTarget(std::string_view target);
// Host and port of a TCP target; of a list: the first address.
struct HostAndPort {
  std::string host;  // without brackets
  std::string port;
};
HostAndPort ParseTarget(const std::string& target);
// Whether the target has several addresses.
bool IsList(const std::string& target);
// Whether it may stand for several servers, over which calls are spread: a list, or a name other
// than localhost.
bool MayBeSeveral(const std::string& target);
// The server, in ServerTarget's syntax, from the peer string of a gRPC context.
std::string ServerOfPeer(std::string_view peer);

}  // namespace attend::client
