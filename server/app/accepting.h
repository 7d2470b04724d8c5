// SPDX-License-Identifier: Apache-2.0
//
// Whether the server takes new work: an operator stops and resumes it, and the process's end stops
// it for good.
//
//   accepting --1--> stopped --1--> accepting
//        |              |
//        +------2-------+--> ending
//
//   1  Stop, Resume: an operator's calls.
//   2  End: a signal, or the server goes.
//
// One change at a time, so that what is told of it (health, metrics, streams) comes in order.
// Thread-safe.

#pragma once

#include <functional>
#include <utility>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend {

class Accepting {
 public:
  // What a change does. They are not called at once, and must not call back.
  Accepting(std::function<void()> stop, std::function<void()> resume)
      : stop_(std::move(stop)), resume_(std::move(resume)) {}

  void Stop() {
    const MutexLock lock(mutex_);
    if (!ending_) stop_();
  }
  // FAILED_PRECONDITION: the process is ending.
  Status Resume() {
    const MutexLock lock(mutex_);
    if (ending_) {
      return Status(Code::kFailedPrecondition, "the process is ending, it takes no new work again");
    }
    resume_();
    return Status();
  }
  void End() {
    const MutexLock lock(mutex_);
    ending_ = true;
    stop_();
  }
  bool ending() const {
    const MutexLock lock(mutex_);
    return ending_;
  }

 private:
  const std::function<void()> stop_;
  const std::function<void()> resume_;
  mutable Mutex mutex_;
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
