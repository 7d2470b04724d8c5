// SPDX-License-Identifier: Apache-2.0
//
// Whether the process that listens on a socket is trusted to be the server.

#pragma once

#include "kernels/util/status.h"

namespace attend::client {

struct SharedSocket;

// PERMISSION_DENIED: the process at the other end of `socket` is not trusted; SharedSocket has the
// rule.
Status CheckListener(int socket, const SharedSocket& at);

}  // namespace attend::client
