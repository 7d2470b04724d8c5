// SPDX-License-Identifier: Apache-2.0
//
// Identifies calls by their connection.

#pragma once

#include <string>

namespace attend {

// The peer name of calls on the connection, such as ipv4:127.0.0.1:1234 or unix:PATH:NUMBER: unique
// among the open connections to an address of this server. Empty if the connection has been closed
// or its family is not served.
std::string CallPeer(int socket);

}  // namespace attend
