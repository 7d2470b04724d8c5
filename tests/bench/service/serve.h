// SPDX-License-Identifier: Apache-2.0
//
// The counterpart of server_process.h: runs this program as a server.

#pragma once

#include <optional>
#include <span>
#include <string>

namespace attend::bench {

// arguments[0] is the kind:
//   attend FLAGS...               attend-server with its flags
//   attend-pass-through FLAGS...  the same on a device that computes nothing
//   echo LISTEN ANSWER_BYTES [CERT KEY]    a bare gRPC server, with TLS if it has these files
//   inline-echo LISTEN ANSWER_BYTES        the fastest one that gRPC's callbacks allow
//   raw-tcp                       one without gRPC
//   abandon ADDRESS SOCKET        a client that starts large calls and never ends them, some of
//                                 them with a region that it created at this socket
// Serves until the end of its input; returns an exit code if it cannot.
int Serve(std::span<const std::string> arguments);
// The same if the program was started by ServeCommand (--serve KIND ...); otherwise nullopt.
std::optional<int> ServeIfAsked(int argc, char** argv);

}  // namespace attend::bench
