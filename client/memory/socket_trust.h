// SPDX-License-Identifier: Apache-2.0
//
// Whether a process that listens at a path is the server.

#pragma once

#include "kernels/util/status.h"

namespace attend::client {

struct SharedSocket;

// PERMISSION_DENIED: the process at the other end of `socket` is not one that SharedSocket
// believes.
Status CheckListener(int socket, const SharedSocket& at);

}  // namespace attend::client
