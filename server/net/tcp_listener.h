// SPDX-License-Identifier: Apache-2.0
//
// Sockets that listen on TCP addresses.

#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

struct TcpKeepalive {
  std::chrono::seconds time{60};     // of silence before the peer is asked
  std::chrono::seconds timeout{20};  // for its answer, and for taking what was sent
};

struct TcpListeners {
  std::vector<UniqueFd> sockets;  // one for each address of the name
  int port = 0;
};

// Non-blocking sockets listening at `address`, HOST:PORT; port 0 becomes any that is free. A name
// stands for all its addresses that this machine has, 0.0.0.0 and [::] for every address of both
// families. What is accepted sends without delay, as gRPC's own listeners have it, and ends with
// its peer's machine (keep-alive). gRPC's own pings cost a timer for each read. An error is one
// line: why.
Result<TcpListeners> ListenTcp(const std::string& address, const TcpKeepalive& keepalive = {});

// "host:0" with the port that was bound.
std::string WithPort(const std::string& address, int port);

}  // namespace attend
