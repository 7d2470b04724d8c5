// SPDX-License-Identifier: Apache-2.0
//
// Parses server addresses as people write them. Pure.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr int kDefaultPort = 8001;

// gRPC's target for HOST, HOST:PORT, [IPV6]:PORT, IPV6, several of these with IP addresses of one
// family and commas between them, unix:PATH, or a name in gRPC's own syntax (dns:, ipv4:, ipv6:,
// unix-abstract:). Without a port: kDefaultPort. INVALID_ARGUMENT for anything else, because gRPC
// would take it for a host name and look it up.
Result<std::string> ServerTarget(const std::string& server);

// Whether such a target is a Unix socket, and no host whose name begins like one.
bool IsUnixTarget(std::string_view target);
// The parts of a target of TCP. Of several servers: the first one's.
struct HostAndPort {
  std::string host;  // without brackets
  std::string port;
};
HostAndPort ParseTarget(const std::string& target);
// Whether the target has several addresses.
bool IsList(const std::string& target);
// Whether it may stand for several servers, over which calls are spread: it is a list, or a name
// other than localhost.
bool MayBeSeveral(const std::string& target);
// A server as ServerTarget takes it, from what gRPC's contexts call their peer.
std::string ServerOfPeer(std::string_view peer);

}  // namespace attend::client
