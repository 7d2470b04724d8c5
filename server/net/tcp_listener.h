// SPDX-License-Identifier: Apache-2.0
//
// Opens listening TCP sockets.

#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

struct TcpKeepalive {
  std::chrono::seconds time{60};  // idle time before the first probe
  // For a reply to a probe, and for an acknowledgement of sent data.
  std::chrono::seconds timeout{20};
};

// Which hosts may be able to connect.
enum class TcpReach { kAnyone, kThisMachine };

struct TcpListeners {
  std::vector<UniqueFd> sockets;  // one per address of the name
  int port = 0;
};

// Non-blocking listening sockets for `address`, HOST:PORT; port 0 picks a free one. A name means
// all of its addresses that this host has; 0.0.0.0 and [::] mean every address of both families.
// Accepted connections have TCP_NODELAY, and TCP keep-alive, which ends them when the peer's
// machine is gone without HTTP/2 pings and their timers. The error is one line with the reason; an
// address that more hosts than `reach` can connect to is an error.
Result<TcpListeners> ListenTcp(const std::string& address, const TcpKeepalive& keepalive = {},
                               TcpReach reach = TcpReach::kAnyone);

// Whether only this host reaches the address, HOST:PORT. An error if the name does not resolve now.
// It may resolve differently later, so an address that must be loopback needs
// TcpReach::kThisMachine too.
Result<bool> IsLoopback(const std::string& address);

// Accepts a connection, non-blocking. If it is not valid, errno has the reason.
UniqueFd Accept(int listener);
// A descriptor held in reserve: close it to accept one connection when the process has none left.
UniqueFd OpenSpare();

// "host:0" with the bound port.
std::string WithPort(const std::string& address, int port);

}  // namespace attend
