// SPDX-License-Identifier: Apache-2.0
//
// The other side of server_process.h: this program as one of the servers.

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
//   abandon ADDRESS SOCKET        a client that has large calls under way and never ends them, some
//                                 of them over a region that it made at this socket
// Serves until its input ends; returns an exit code if it cannot.
int Serve(std::span<const std::string> arguments);
// The same for a program that was started as ServeCommand says (--serve KIND ...); none: it was
// not.
std::optional<int> ServeIfAsked(int argc, char** argv);

}  // namespace attend::bench
