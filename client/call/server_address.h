// SPDX-License-Identifier: Apache-2.0
//
// Parses server addresses as people write them. Pure.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr int kDefaultPort = 8001;

// gRPC's target for HOST, HOST:PORT, [IPV6]:PORT, IPV6, unix:PATH, or a name in gRPC's own syntax
// (dns:, ipv4:, ipv6:, unix-abstract:). Without a port: kDefaultPort. INVALID_ARGUMENT for anything
// else, because gRPC would take it for a host name and look it up.
Result<std::string> ServerTarget(const std::string& server);

// Whether such a target is a Unix socket, and no host whose name begins like one.
bool IsUnixTarget(std::string_view target);

}  // namespace attend::client
