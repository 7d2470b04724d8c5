// SPDX-License-Identifier: Apache-2.0
//
// Reports the server's state to systemd, or a supervisor that works like it: the sd_notify(3)
// protocol, which sends one datagram.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// Sends `state`, lines of NAME=VALUE, to `socket`, the value of $NOTIFY_SOCKET: a path beginning
// with / or, for the abstract namespace, with @. OK if it is empty: there is no supervisor.
// INVALID_ARGUMENT, UNAVAILABLE: nothing was sent. Never waits.
Status TellServiceManager(const std::string& socket, std::string_view state);

}  // namespace attend
