// SPDX-License-Identifier: Apache-2.0
//
// Opens sockets that listen on TCP addresses.

#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

struct TcpKeepalive {
  std::chrono::seconds time{60};     // of silence before the peer is probed
  std::chrono::seconds timeout{20};  // for its answer, and for acknowledging what was sent
};

// Who may be able to reach what is listened at.
enum class TcpReach { kAnyone, kThisMachine };

struct TcpListeners {
  std::vector<UniqueFd> sockets;  // one for each address of the name
  int port = 0;
};

// Non-blocking sockets listening at `address`, HOST:PORT; port 0 is replaced by a free one. A name
// stands for all its addresses that this machine has, 0.0.0.0 and [::] for every address of both
// families. Accepted connections send without delay, as with gRPC's own listeners, and end when
// their peer's machine is gone (keep-alive). gRPC's own pings would cost a timer for each read. An
// error is one line that says why; that others than `reach` has could connect is one.
Result<TcpListeners> ListenTcp(const std::string& address, const TcpKeepalive& keepalive = {},
                               TcpReach reach = TcpReach::kAnyone);

// Whether only this machine reaches the address, HOST:PORT. An error for a name that has no address
// now. It may have others the next time: what must be of loopback is given to ListenTcp so.
Result<bool> IsLoopback(const std::string& address);

// A connection to a listening socket, which does not block either. Not valid: errno says why.
UniqueFd Accept(int listener);
// A descriptor to close for a connection where the process has none left.
UniqueFd OpenSpare();

// "host:0" with the port that was bound.
std::string WithPort(const std::string& address, int port);

}  // namespace attend
