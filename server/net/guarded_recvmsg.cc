// SPDX-License-Identifier: Apache-2.0
//
// The recvmsg, sendmsg, close and getpeername of a process that links attend_read_guard, in libc's
// place: gRPC reads, writes, closes and names its connections with them.

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "server/net/read_guard.h"

extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int socket, msghdr* message,
                                                                  int flags) {
  const ssize_t bytes = syscall(SYS_recvmsg, socket, message, flags);
  if (bytes <= 0 || attend::ReadGuard::Passes(socket, *message, bytes)) return bytes;
  // Closed with a reset: a client that still writes, while nothing more is read, would otherwise
  // wait until the system forgets the connection, a minute later.
  const linger reset{1, 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  shutdown(socket, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}

extern "C" __attribute__((visibility("default"))) ssize_t sendmsg(int socket, const msghdr* message,
                                                                  int flags) {
  attend::ReadGuard::Sending(socket, *message);
  const ssize_t bytes = syscall(SYS_sendmsg, socket, message, flags);
  if (bytes > 0) attend::ReadGuard::Sent(socket, bytes);
  return bytes;
}

// A client of a Unix socket has no name, or one of its own choice. gRPC is told the path of the
// socket instead, so that calls can be told apart by it.
extern "C" __attribute__((visibility("default"))) int getpeername(int fd, sockaddr* address,
                                                                  socklen_t* size) noexcept {
  const socklen_t room = *size;
  const auto result = static_cast<int>(syscall(SYS_getpeername, fd, address, size));
  if (result != 0 || address->sa_family != AF_UNIX || !attend::ReadGuard::Guards(fd)) {
    return result;
  }
  *size = room;
  return static_cast<int>(syscall(SYS_getsockname, fd, address, size));
}

extern "C" __attribute__((visibility("default"))) int close(int fd) {
  attend::ReadGuard::End(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}
