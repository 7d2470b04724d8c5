// SPDX-License-Identifier: Apache-2.0
//
// Where a server is, as people write it. Pure.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr int kDefaultPort = 8001;

// What gRPC is to connect to, from HOST, HOST:PORT, [IPV6]:PORT, IPV6, unix:PATH, or a name in
// gRPC's own syntax (dns:, ipv4:, ipv6:, unix-abstract:). Without a port: kDefaultPort.
// INVALID_ARGUMENT for anything else, since gRPC takes what it does not understand for a host and
// looks for it.
Result<std::string> ServerTarget(const std::string& server);

}  // namespace attend::client
