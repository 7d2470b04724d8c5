// SPDX-License-Identifier: Apache-2.0
//
// Faults at the N-th call, for fake devices.

#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "kernels/util/status.h"

namespace attend::test {

// Counts the calls of one entry point, and fails chosen ones. Not thread-safe.
class CallFaults {
 public:
  // The N-th call from now (1 = the next) fails.
  void FailNth(int n, Status status) { planned_[calls_ + n] = std::move(status); }
  void Forget() { planned_.clear(); }
  // Counts a call and returns its status.
  Status Next() {
    const auto found = planned_.find(++calls_);
    return found == planned_.end() ? Status() : found->second;
  }
  int64_t calls() const { return calls_; }

 private:
  int64_t calls_ = 0;
  std::map<int64_t, Status> planned_;  // by number of the call
};

}  // namespace attend::test
