// SPDX-License-Identifier: Apache-2.0
//
// A listening Unix socket at a path that belongs to one process at a time.

#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <string>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

// The default path for a server of this user: in $XDG_RUNTIME_DIR, else in the user's own folder in
// /tmp.
std::string DefaultSocketPath();

struct UnixListenOptions {
  std::string path;
  std::string name;                      // how error messages begin: setting and path
  int type = SOCK_STREAM;                // or SOCK_SEQPACKET
  mode_t mode = 0600;                    // of the socket's file
  gid_t group = static_cast<gid_t>(-1);  // of the socket's file; -1: this process's
  // Creates missing folders, for this user alone or for all to pass. Refuses a folder into which
  // others could put a socket of their own, and symbolic links.
  bool own_folder = false;
};

// What is needed to remove a listening socket again.
struct UnixListener {
  UniqueFd socket;
  UniqueFd lock;    // of the file `path`.lock: its holder owns the path
  UniqueFd folder;  // where both files are
  std::string file;
  ino_t inode = 0;  // of the socket's file
};

// Makes a non-blocking socket that listens at the path. A stale socket, on which no process listens
// any more, is replaced; anything else at the path is an error, as is another process's lock. Does
// not wait.
Result<UnixListener> ListenAt(const UnixListenOptions& options);

// Removes what ListenAt made, but nothing that another process has put in its place. The order lets
// another process take over the path.
void StopListening(UnixListener* listener);

}  // namespace attend
