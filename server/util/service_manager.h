// SPDX-License-Identifier: Apache-2.0
//
// Tells systemd, or whatever supervises the process the same way, what the server is doing: the
// protocol of sd_notify(3), which is a datagram.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// Sends `state`, lines of NAME=VALUE, to the socket that $NOTIFY_SOCKET names (`socket`): a path
// that begins with / or, for one in the abstract namespace, with @. OK if it is empty: nobody
// listens. INVALID_ARGUMENT, UNAVAILABLE: why nothing was sent. Never waits.
Status TellServiceManager(const std::string& socket, std::string_view state);

}  // namespace attend
