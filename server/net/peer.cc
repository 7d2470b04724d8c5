// SPDX-License-Identifier: Apache-2.0

#include "server/net/peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace attend {
namespace {

std::string Bytes(const void* data, size_t size) {
  return std::string(static_cast<const char*>(data), size);
}

}  // namespace

std::string PeerOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  if (address.ss_family == AF_UNIX) {
    ucred peer{};
    size = sizeof(peer);
    getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return "u" + std::to_string(peer.uid);
  }
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return "4" + Bytes(&v4.sin_addr, 4);
  }
  const uint8_t* const v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr.s6_addr;
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<sockaddr_in6&>(address).sin6_addr);
  return mapped ? "4" + Bytes(v6 + 12, 4) : "6" + Bytes(v6, 8);
}

bool IsLoopbackAddress(const sockaddr_storage& address) {
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (address.ss_family == AF_INET) return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
  if (address.ss_family != AF_INET6) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

bool IsFromLoopback(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         IsLoopbackAddress(address);
}

std::string PeerText(int socket) {
  const std::string peer = PeerOf(socket);
  if (peer.empty()) return "a client that has disconnected";
  if (peer[0] == 'u') return "user " + peer.substr(1);
  std::array<uint8_t, 16> bytes{};  // the interface part of an IPv6 address is zero
  std::copy(peer.begin() + 1, peer.end(), bytes.begin());
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(peer[0] == '4' ? AF_INET : AF_INET6, bytes.data(), text.data(), text.size());
  return peer[0] == '4' ? text.data() : std::string(text.data()) + "/64";
}

}  // namespace attend
