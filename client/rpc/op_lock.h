// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the lock of an operation, under which gRPC is called but no code of the
// user's runs. README.md of this room has the rule.

#pragma once

#include <mutex>
#include <optional>
#include <utility>

#include "client/rpc/completion_loop.h"
#include "client/wire/borrowed_slice.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// Keeps what gRPC lets go of on this thread. At its end it runs the deleters here, or, given a
// loop, has that loop's thread run them: where the thread is the user's.
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

// As MutexLock. What gRPC lets go of while it is held is kept until it is not. `loop`: as
// KeptReleases has it; null on a completion thread.
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
  std::optional<KeptReleases> kept_;  // ends after the lock
  MutexLock lock_;
};

}  // namespace attend::client
