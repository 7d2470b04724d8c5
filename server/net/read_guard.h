// SPDX-License-Identifier: Apache-2.0
//
// Inspects what gRPC reads from its connections, before gRPC does. A process that links
// attend_read_guard has its own recvmsg, which asks here, its own sendmsg, which reports what the
// server answers, and its own close. Without it nothing is inspected. Bytes are neither copied nor
// changed. Meant for connections without TLS.

#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <functional>

#include "server/net/http2_frames.h"

namespace attend {

class ReadGuard {
 public:
  // Told what was wrong with a connection that is being ended. Called on any thread.
  using OnWrong = std::function<void(int socket, const char* what)>;

  // gRPC reads the connection from now on, from its first byte. `clock` and `on_wrong` must
  // outlive it. Call this before another thread can read it. False if there is no entry for so high
  // a descriptor: what is read would not be inspected.
  static bool Begin(int socket, ino_t inode, const Http2Frames::Limits& limits, const Clock& clock,
                    const OnWrong* on_wrong);
  // False if gRPC must not get what has just been read.
  static bool Passes(int socket, const msghdr& message, ssize_t bytes);
  // The message is about to be sent. If only a part of it is sent, this is called again for the
  // rest.
  static void Sending(int socket, const msghdr& message);
  // `bytes` of it have been sent.
  static void Sent(int socket, ssize_t bytes);
  // The same for a connection that is inspected elsewhere: its end alone is of interest.
  static void BeginUnread(int socket, ino_t inode);
  // Calls then() if the connection that has begun with this inode is still open, which it stays
  // meanwhile. Any thread.
  static void WhileOpen(int socket, ino_t inode, const std::function<void()>& then);
  // The inode of a connection that has begun and not ended; 0: it is none.
  static ino_t InodeOf(int socket);
  // The descriptor is about to be closed; gRPC itself reports this to no one.
  static void End(int socket);
};

}  // namespace attend
