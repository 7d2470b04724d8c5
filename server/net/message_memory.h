// SPDX-License-Identifier: Apache-2.0
//
// Counts received message bytes of all connections against a bound. Signals when it is time to
// measure what unfinished messages hold. Thread-safe.

#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "server/util/unique_fd.h"

namespace attend {

class MessageMemory {
 public:
  explicit MessageMemory(int64_t most) : most_(most), step_(std::max<int64_t>(1, most / kSteps)) {}

  int64_t most() const { return most_; }
  // Adds received message bytes; signals look() each time the sum passes another sixteenth of the
  // bound.
  void CountRead(int64_t bytes) {
    const int64_t before = read_.fetch_add(bytes, std::memory_order_relaxed);
    if (before / step_ != (before + bytes) / step_) eventfd_write(look_.get(), 1);
  }
  // An eventfd, readable when messages may hold a sixteenth of the bound more than at the last
  // check.
  int look() const { return look_.get(); }

 private:
  static constexpr int64_t kSteps = 16;

  const int64_t most_;
  const int64_t step_;
  const UniqueFd look_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<int64_t> read_{0};
};

}  // namespace attend
