// SPDX-License-Identifier: Apache-2.0
//
// Whether the server accepts new work. An operator stops and resumes it; shutting down stops it for
// good.
//
//   accepting --1--> stopped --1--> accepting
//        |              |
//        +------2-------+--> ending
//
//   1  Stop, Resume: an operator's calls.
//   2  End: a signal, or the server's destruction.
//
// Changes are serialised, so that health, metrics and streams see them in order. Thread-safe.

#pragma once

#include <functional>
#include <utility>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend {

class Accepting {
 public:
  // The actions of a change. Never called concurrently; they must not call back.
  Accepting(std::function<void()> stop, std::function<void()> resume)
      : stop_(std::move(stop)), resume_(std::move(resume)) {}

  void Stop() {
    const MutexLock lock(mutex_);
    if (!ending_) stop_();
  }
  // FAILED_PRECONDITION: the process is shutting down.
  Status Resume() {
    const MutexLock lock(mutex_);
    if (ending_) {
      return Status(Code::kFailedPrecondition,
                    "the process is shutting down; draining cannot be undone");
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
