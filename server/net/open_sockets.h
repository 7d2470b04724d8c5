// SPDX-License-Identifier: Apache-2.0
//
// The sockets of served connections, so that another thread can end one. A closed descriptor may be
// reused at once, so each is stored with its inode. Thread-safe.

#pragma once

#include <sys/types.h>

#include <unordered_map>

#include "kernels/util/mutex.h"

namespace attend {

class OpenSockets {
 public:
  // The socket is served from now on. May throw std::bad_alloc.
  void Begin(int socket, ino_t inode) {
    const MutexLock lock(mutex_);
    open_[socket] = inode;
  }
  // Call it before the socket is closed.
  void End(int socket) {
    const MutexLock lock(mutex_);
    open_.erase(socket);
  }
  // Calls then() if the socket with this inode is still open. It stays open during the call.
  template <class Then>
  void WhileOpen(int socket, ino_t inode, const Then& then) {
    const MutexLock lock(mutex_);
    const auto found = open_.find(socket);
    if (found != open_.end() && found->second == inode) then();
  }

 private:
  Mutex mutex_;
  std::unordered_map<int, ino_t> open_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
