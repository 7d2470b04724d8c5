// SPDX-License-Identifier: Apache-2.0
//
// Whose a connection is, as connections and calls are counted by.

#pragma once

#include <sys/socket.h>

#include <string>

namespace attend {

// The peer of a connection: an IPv4 address, the /64 network of an IPv6 address, or a user on this
// host.
std::string PeerOf(int socket);
// The same as text; for an IPv6 address, the network.
std::string PeerText(int socket);
// Whether it is of this host: an IP address of loopback.
bool IsLoopbackAddress(const sockaddr_storage& address);
bool IsFromLoopback(int socket);

}  // namespace attend
