// SPDX-License-Identifier: Apache-2.0
//
// A Unix socket that listens at a path and belongs to one process at a time.

#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <string>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

// Where a server of this user looks by default: in $XDG_RUNTIME_DIR, else in a folder of the
// user's own in /tmp.
std::string DefaultSocketPath();

struct UnixListenOptions {
  std::string path;
  std::string name;                      // what errors open with: setting and path
  int type = SOCK_STREAM;                // or SOCK_SEQPACKET
  mode_t mode = 0600;                    // of the socket's file
  gid_t group = static_cast<gid_t>(-1);  // of the socket's file; -1: this process's
  // Folders that are missing are made, for this user alone or for all to pass; one that others
  // could put a socket of their own into is refused, and so is a symbolic link.
  bool own_folder = false;
};

// Of a socket that listens, what removes it again.
struct UnixListener {
  UniqueFd socket;
  UniqueFd lock;    // of the file `path`.lock: whoever holds it owns the path
  UniqueFd folder;  // where both files are
  std::string file;
  ino_t inode = 0;  // of the socket's file
};

// A non-blocking socket that listens at the path. A socket that nobody listens on any more is
// replaced; anything else at the path is an error, as is another process's lock. Waits for nobody.
Result<UnixListener> ListenAt(const UnixListenOptions& options);

// Removes what ListenAt made, and nothing that somebody else has put in its place, in the order in
// which another process may take it over.
void StopListening(UnixListener* listener);

}  // namespace attend
