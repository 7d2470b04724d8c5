// SPDX-License-Identifier: Apache-2.0

#include "server/net/tcp_listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "server/net/peer.h"

namespace attend {
namespace {

// Unanswered keep-alive probes after which the peer counts as gone.
constexpr int kProbes = 4;

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  bool both_families = false;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  void SetPort(int port) {
    // sin_port and sin6_port have the same offset.
    reinterpret_cast<sockaddr_in*>(&bytes)->sin_port = htons(static_cast<uint16_t>(port));
  }
};

Address AnyAddress(int family) {
  Address any;
  any.bytes.ss_family = static_cast<sa_family_t>(family);
  any.size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  any.both_families = family == AF_INET6;
  return any;
}

Result<std::vector<Address>> Resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (failed != 0) {
    return Unavailable(failed == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(failed));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    Address address;
    std::memcpy(&address.bytes, each->ai_addr, each->ai_addrlen);
    address.size = each->ai_addrlen;
    // A hosts file may list an address twice.
    const bool known = std::any_of(addresses.begin(), addresses.end(), [&](const Address& other) {
      return other.size == address.size &&
             std::memcmp(&other.bytes, &address.bytes, address.size) == 0;
    });
    if (!known) addresses.push_back(address);
  }
  return addresses;
}

void SetOption(const UniqueFd& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));
}

// 0 or an errno.
int Listen(Address& address, const TcpKeepalive& keepalive, UniqueFd& socket) {
  socket =
      UniqueFd(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno;
  // Connections of an earlier server may linger in TIME_WAIT. A second listener on the address is
  // still an error.
  SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  // Accepted sockets inherit these options.
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  const int timeout_s = static_cast<int>(keepalive.timeout.count());
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(keepalive.time.count()));
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, (timeout_s + kProbes - 1) / kProbes);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, timeout_s * 1000);
  if (address.bytes.ss_family == AF_INET6) {
    SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, address.both_families ? 0 : 1);
  }
  if (bind(socket.get(), address.get(), address.size) != 0) return errno;
  return listen(socket.get(), SOMAXCONN) == 0 ? 0 : errno;
}

int PortOf(const UniqueFd& socket) {
  sockaddr_storage bytes{};
  socklen_t size = sizeof(bytes);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bytes), &size) != 0) return 0;
  return ntohs(reinterpret_cast<const sockaddr_in*>(&bytes)->sin_port);
}

std::string HostOf(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  if (host.starts_with('[') && host.ends_with(']')) return host.substr(1, host.size() - 2);
  return host;
}

bool IsAny(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

Result<std::vector<Address>> AddressesOf(const std::string& host) {
  if (!IsAny(host)) return Resolve(host);
  return std::vector<Address>{AnyAddress(AF_INET6), AnyAddress(AF_INET)};
}

bool AreLoopback(const std::vector<Address>& addresses) {
  return std::all_of(addresses.begin(), addresses.end(),
                     [](const Address& each) { return IsLoopbackAddress(each.bytes); });
}

// The host may have only one of the address families.
bool HasNoSuchAddress(int error) { return error == EADDRNOTAVAIL || error == EAFNOSUPPORT; }

}  // namespace

UniqueFd Accept(int listener) {
  return UniqueFd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

UniqueFd OpenSpare() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

std::string WithPort(const std::string& address, int port) {
  return address.substr(0, address.rfind(':') + 1) + std::to_string(port);
}

Result<bool> IsLoopback(const std::string& address) {
  const Result<std::vector<Address>> addresses = AddressesOf(HostOf(address));
  if (!addresses.ok()) return addresses.status();
  return AreLoopback(*addresses);
}

Result<TcpListeners> ListenTcp(const std::string& address, const TcpKeepalive& keepalive,
                               TcpReach reach) {
  const std::string host = HostOf(address);
  TcpListeners listeners;
  listeners.port = std::stoi(address.substr(address.rfind(':') + 1));
  const bool any = IsAny(host);
  Result<std::vector<Address>> addresses = AddressesOf(host);
  if (!addresses.ok()) return addresses.status();
  if (reach == TcpReach::kThisMachine && !AreLoopback(*addresses)) {
    return Unavailable("the address is beyond loopback");
  }
  int error = EADDRNOTAVAIL;
  for (Address& each : *addresses) {
    if (any && !listeners.sockets.empty()) break;
    each.SetPort(listeners.port);
    UniqueFd socket;
    error = Listen(each, keepalive, socket);
    if (HasNoSuchAddress(error)) continue;
    if (error != 0) return Unavailable(std::strerror(error));
    listeners.port = PortOf(socket);
    listeners.sockets.push_back(std::move(socket));
  }
  if (listeners.sockets.empty()) return Unavailable(std::strerror(error));
  return listeners;
}

}  // namespace attend
