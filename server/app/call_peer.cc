// SPDX-License-Identifier: Apache-2.0

#include "server/app/call_peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>

#include "server/app/unix_address.h"

namespace attend {
namespace {

std::string Port(in_port_t port) { return ":" + std::to_string(ntohs(port)); }

std::string PeerOfV4(const in_addr& address, in_port_t port) {
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address, text.data(), text.size());
  return std::string("ipv4:") + text.data() + Port(port);
}

// With escaped brackets and scope id, as in the path of a URI.
std::string PeerOfV6(const sockaddr_in6& peer) {
  if (IN6_IS_ADDR_V4MAPPED(&peer.sin6_addr)) {
    in_addr v4{};
    std::memcpy(&v4, &peer.sin6_addr.s6_addr[12], sizeof(v4));
    return PeerOfV4(v4, peer.sin6_port);
  }
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, &peer.sin6_addr, text.data(), text.size());
  const std::string scope =
      peer.sin6_scope_id == 0 ? "" : "%25" + std::to_string(peer.sin6_scope_id);
  return std::string("ipv6:%5B") + text.data() + scope + "%5D" + Port(peer.sin6_port);
}

}  // namespace

std::string CallPeer(int socket, ino_t inode) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return PeerOfV4(v4.sin_addr, v4.sin_port);
  }
  if (peer.ss_family == AF_INET6) return PeerOfV6(reinterpret_cast<const sockaddr_in6&>(peer));
  if (peer.ss_family != AF_UNIX) return "";
  sockaddr_un own{};
  size = sizeof(own);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
  const std::string path(own.sun_path, strnlen(own.sun_path, sizeof(own.sun_path)));
  return PeerOfPath(path) + ":" + std::to_string(inode);
}

}  // namespace attend
