// SPDX-License-Identifier: Apache-2.0

#include "server/util/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "server/util/unique_fd.h"

namespace attend {

Status TellServiceManager(const std::string& socket, std::string_view state) {
  if (socket.empty()) return {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket[0] != '/' && socket[0] != '@') {
    return InvalidArgument("NOTIFY_SOCKET is " + socket + ", must begin with / or @");
  }
  if (socket.size() >= sizeof(address.sun_path)) {
    return InvalidArgument("NOTIFY_SOCKET has " + std::to_string(socket.size()) +
                           " characters, must have at most " +
                           std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, socket.data(), socket.size());
  if (socket[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto address_bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket.size());
  if (fd.get() < 0 || sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
                             reinterpret_cast<const sockaddr*>(&address), address_bytes) < 0) {
    return Unavailable("NOTIFY_SOCKET " + socket + ": " + std::strerror(errno));
  }
  return {};
}

}  // namespace attend
