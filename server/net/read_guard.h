// SPDX-License-Identifier: Apache-2.0
//
// Looks at what gRPC reads from its connections, before gRPC does: a process that links
// attend_read_guard has a recvmsg of its own, which asks here, a sendmsg, which tells what the
// server answers, and a close. Without it nothing is looked at.
// Bytes are neither copied nor changed. Meant for connections without TLS.

#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <functional>

#include "server/net/http2_frames.h"

namespace attend {

class ReadGuard {
 public:
  // Told what was wrong with a connection that is being ended. From any thread.
  using OnWrong = std::function<void(int socket, const char* what)>;

  // The connection is read by gRPC from now on, from its first byte. `on_wrong` outlives it. Before
  // another thread can read it.
  // False if there is no place for so high a descriptor: nobody would look at what is read.
  static bool Begin(int socket, ino_t inode, const Http2Frames::Limits& limits,
                    const OnWrong* on_wrong);
  // False if what has just been read must not be gRPC's.
  static bool Passes(int socket, const msghdr& message, ssize_t bytes);
  // The message is about to be sent. If only a part is, the rest comes again.
  static void Sending(int socket, const msghdr& message);
  // So much of it has been sent.
  static void Sent(int socket, ssize_t bytes);
  // The descriptor is about to be closed: gRPC tells nobody when it does so.
  static void End(int socket);
};

}  // namespace attend
