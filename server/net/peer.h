// SPDX-License-Identifier: Apache-2.0
//
// The peer of a connection: the key by which connections and calls are counted.

#pragma once

#include <sys/socket.h>

#include <string>

namespace attend {

// An IPv4 address, the /64 network of an IPv6 address, or a user of this host (Unix socket). Empty
// if the client has disconnected.
std::string PeerOf(int socket);
// As text for logs.
std::string PeerText(int socket);
// Whether the address is a loopback address of this host.
bool IsLoopbackAddress(const sockaddr_storage& address);
bool IsFromLoopback(int socket);

}  // namespace attend
