// SPDX-License-Identifier: Apache-2.0
//
// A Unix socket that listens at a path of this user's own, and belongs to one process at a time.

#pragma once

#include <string>

#include "kernels/status.h"
#include "server/unique_fd.h"

namespace attend {

// Where a server of this user looks by default: in $XDG_RUNTIME_DIR, else in a folder of the
// user's own in /tmp.
std::string DefaultSocketPath();

struct UnixListener {
  UniqueFd socket;
  UniqueFd lock;  // of the file `path`.lock: whoever holds it owns the path
};

// A non-blocking SOCK_SEQPACKET socket listening at `path`, with the mode 0600, or 0666 if
// `any_user`. Folders that are missing are made with the mode 0700 (0755); one that others could
// put a socket of their own into is refused, and so is a symbolic link. A socket that nobody
// listens on any more is replaced; anything else at the path is an error, as is another process's
// lock. Waits for nobody.
Result<UnixListener> ListenAt(const std::string& path, bool any_user);

// Removes what ListenAt made, in the order in which another process may take it over.
void StopListening(const std::string& path, UnixListener* listener);

}  // namespace attend
