// SPDX-License-Identifier: Apache-2.0
//
// How calls are known by the connection that they come over.

#pragma once

#include <sys/types.h>

#include <string>

namespace attend {

// The peer of calls over the connection, whose inode is `inode`, as grpc::ServerContext has it.
// No other open connection to the same address of this server has it. Empty: the connection has
// ended, or is of no family that is listened on.
std::string CallPeer(int socket, ino_t inode);

}  // namespace attend
