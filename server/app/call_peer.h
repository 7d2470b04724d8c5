// SPDX-License-Identifier: Apache-2.0
//
// Identifies calls by their connection.

#pragma once

#include <sys/types.h>

#include <string>

namespace attend {

// The peer name of calls on the connection, in the format of grpc::ServerContext::peer(); `inode`
// is the socket's. Unique among the open connections to an address of this server. Empty if the
// connection has been closed or its family is not served.
std::string CallPeer(int socket, ino_t inode);

}  // namespace attend
