// SPDX-License-Identifier: Apache-2.0
//
// The recvmsg and sendmsg of a process that links attend_read_guard, in libc's place: gRPC reads
// and writes its connections with them.

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "server/read_guard.h"

extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int socket, msghdr* message,
                                                                  int flags) {
  const ssize_t bytes = syscall(SYS_recvmsg, socket, message, flags);
  if (bytes <= 0 || attend::ReadGuard::Passes(socket, *message, bytes)) return bytes;
  shutdown(socket, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}

extern "C" __attribute__((visibility("default"))) ssize_t sendmsg(int socket, const msghdr* message,
                                                                  int flags) {
  const ssize_t bytes = syscall(SYS_sendmsg, socket, message, flags);
  if (bytes > 0) attend::ReadGuard::Sent(socket, *message, bytes);
  return bytes;
}
