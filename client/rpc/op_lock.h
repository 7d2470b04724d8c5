// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: an operation's lock, under which gRPC may be called but no user code
// runs. This room's README.md has the rule.

#pragma once

#include <mutex>
#include <optional>
#include <utility>

#include "client/rpc/completion_loop.h"
#include "client/wire/borrowed_slice.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// Collects the memory that gRPC releases on this thread. The destructor runs the deleters: on this
// thread, or, on a user's thread, on the thread of the given loop.
class KeptReleases {
 public:
  explicit KeptReleases(CompletionLoop* loop) : loop_(loop) {}
  ~KeptReleases() {
    ReleasedMemory released = gate_.End();
    if (loop_ != nullptr && !released.empty()) loop_->Release(std::move(released));
  }
  KeptReleases(const KeptReleases&) = delete;
  KeptReleases& operator=(const KeptReleases&) = delete;

 private:
  CompletionLoop* const loop_;
  ReleaseGate gate_;
};

// A MutexLock that also collects the memory that gRPC releases while it is held, and runs the
// deleters after unlocking. `loop` as for KeptReleases; null on a completion thread.
class ATTEND_SCOPED_LOCK OpLock {
 public:
  explicit OpLock(Mutex& mutex, CompletionLoop* loop = nullptr) ATTEND_ACQUIRE(mutex)
      : loop_(loop), kept_(std::in_place, loop), lock_(mutex) {}
  ~OpLock() ATTEND_RELEASE() {}

  void Unlock() ATTEND_RELEASE() {
    lock_.Unlock();
    kept_.reset();
  }
  void Lock() ATTEND_ACQUIRE() {
    kept_.emplace(loop_);
    lock_.Lock();
  }

 private:
  CompletionLoop* const loop_;
  std::optional<KeptReleases> kept_;  // destroyed after the lock
  MutexLock lock_;
};

}  // namespace attend::client
