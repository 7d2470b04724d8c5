// SPDX-License-Identifier: Apache-2.0
//
// A Unix socket that listens at a path of this user's own.

#pragma once

#include <string>

#include "kernels/status.h"
#include "server/unique_fd.h"

namespace attend {

// Where a server of this user looks by default: in $XDG_RUNTIME_DIR, else in a folder of the
// user's own in /tmp.
std::string DefaultSocketPath();

// A non-blocking SOCK_SEQPACKET socket listening at `path`, with the mode 0600, or 0666 if
// `any_user`. Folders that are missing are made with the mode 0700 (0755); one that others could
// put a socket of their own into is refused. A socket that nobody listens on any more is replaced;
// anything else at the path is an error.
Result<UniqueFd> ListenAt(const std::string& path, bool any_user);

}  // namespace attend
