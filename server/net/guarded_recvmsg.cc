// SPDX-License-Identifier: Apache-2.0
//
// The recvmsg, sendmsg, close and getpeername of a process that links attend_read_guard, in libc's
// place: gRPC reads, writes, closes and names its connections with them.

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "server/net/read_guard.h"

namespace {

// Adds ":NUMBER" to the address's path, if there is room for it.
void AddNumber(ino_t number, socklen_t room, sockaddr* address, socklen_t* size) {
  constexpr size_t kFamily = offsetof(sockaddr, sa_data);
  if (room <= kFamily || *size > room) return;
  const size_t path_room = room - kFamily;
  char* const path = reinterpret_cast<char*>(address) + kFamily;  // longer than sa_data
  const size_t length = strnlen(path, path_room);
  char text[24];
  const int added = std::snprintf(text, sizeof(text), ":%ju", static_cast<uintmax_t>(number));
  if (length + static_cast<size_t>(added) + 1 > path_room) return;
  std::memcpy(path + length, text, static_cast<size_t>(added) + 1);
  *size = static_cast<socklen_t>(kFamily + length + static_cast<size_t>(added) + 1);
}

}  // namespace

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
// socket instead, and the inode of the connection, so that calls can be told apart by both.
extern "C" __attribute__((visibility("default"))) int getpeername(int fd, sockaddr* address,
                                                                  socklen_t* size) noexcept {
  const socklen_t room = *size;
  const auto result = static_cast<int>(syscall(SYS_getpeername, fd, address, size));
  if (result != 0 || address->sa_family != AF_UNIX) return result;
  const ino_t inode = attend::ReadGuard::InodeOf(fd);
  if (inode == 0) return result;
  *size = room;
  const auto named = static_cast<int>(syscall(SYS_getsockname, fd, address, size));
  if (named == 0) AddNumber(inode, room, address, size);
  return named;
}

extern "C" __attribute__((visibility("default"))) int close(int fd) {
  attend::ReadGuard::End(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}
