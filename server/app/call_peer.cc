// SPDX-License-Identifier: Apache-2.0

#include "server/app/call_peer.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cstring>

namespace attend {

std::string CallPeer(int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(socket, address, &size) != 0) return "";
  if (peer.ss_family == AF_UNIX) {
    sockaddr_un own{};
    size = sizeof(own);
    struct stat about {};
    if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
    if (fstat(socket, &about) != 0) return "";
    const std::string path(own.sun_path, strnlen(own.sun_path, sizeof(own.sun_path)));
    return "unix:" + path + ":" + std::to_string(about.st_ino);
  }
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(address, size, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  std::string name = host.data();
  constexpr std::string_view kMapped = "::ffff:";  // IPv4 on a socket for both
  if (name.starts_with(kMapped)) name.erase(0, kMapped.size());
  const bool v6 = name.find(':') != std::string::npos;
  return (v6 ? "ipv6:[" + name + "]:" : "ipv4:" + name + ":") + port.data();
}

}  // namespace attend
