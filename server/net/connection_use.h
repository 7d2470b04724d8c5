// SPDX-License-Identifier: Apache-2.0
//
// The state of a connection: whether it is a stranger, the message bytes it receives, and its
// socket, so that another thread can end it.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/util/mutex.h"
#include "server/util/connection_marks.h"

namespace attend {

class ConnectionUse {
 public:
  std::shared_ptr<const ConnectionMarks> marks;  // null: calls need no credentials here
  std::atomic<bool> spoke{false};                // its first HTTP/2 frame has come
  // Message bytes received so far. One thread adds at a time; any may read.
  std::atomic<int64_t> data_bytes{0};
  // Memory of messages that are unfinished or that no call has read yet, and of the connection's
  // read block.
  std::atomic<int64_t> held_bytes{0};

  explicit ConnectionUse(int socket) : socket_(socket) {}
  bool is_stranger() const {
    return !spoke.load(std::memory_order_relaxed) ||
           (marks != nullptr && !marks->called.load(std::memory_order_relaxed));
  }
  // Call it before the socket is closed. Thread-safe, as are the functions below.
  void End() {
    const MutexLock lock(mutex_);
    socket_ = -1;
  }
  bool ended() const {
    const MutexLock lock(mutex_);
    return socket_ < 0;
  }
  // Calls then(socket) if the socket is still open. It stays open during the call.
  template <class Then>
  void WhileOpen(const Then& then) const {
    const MutexLock lock(mutex_);
    if (socket_ >= 0) then(socket_);
  }

 private:
  mutable Mutex mutex_;
  int socket_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
