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
  std::string name;                      // prefix of error messages: setting and path
  int type = SOCK_STREAM;                // or SOCK_SEQPACKET
  mode_t mode = 0600;                    // of the socket's file
  gid_t group = static_cast<gid_t>(-1);  // of the socket's file; -1: this process's
  // Creates missing folders, accessible to this user only, or traversable by all if others may
  // connect. Refuses symbolic links, and folders in which other users could replace the socket.
  bool own_folder = false;
};

// Needed to remove a listening socket.
struct UnixListener {
  UniqueFd socket;
  UniqueFd lock;    // lock on the file `path`.lock: its holder owns the path
  UniqueFd folder;  // contains both files
  std::string file;
  ino_t inode = 0;  // of the socket's file
};

// Creates a non-blocking socket that listens at the path. Replaces a stale socket, on which no
// process listens. Anything else at the path is an error, as is another process's lock. Does not
// wait.
Result<UnixListener> ListenAt(const UnixListenOptions& options);

// Removes what ListenAt created, but nothing that another process has put in its place. The order
// allows another process to take over the path.
void StopListening(UnixListener* listener);

}  // namespace attend
