// SPDX-License-Identifier: Apache-2.0
//
// The parts of one request, split or uploaded, taken together: how many are open, the first
// failure, and the times that they add up to. Guarded by its owner's mutex.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"
#include "server/request/request.h"

namespace attend {

class PartSet {
 public:
  // How the whole's times follow from the parts'.
  enum class Times {
    kOfTheLast,  // parts run side by side: those of the part that ended last
    kSums,  // they take turns: copies and kernels add up; the queue's are of the one queued last
  };
  PartSet(Times times, int64_t open) : times_(times), open_(open) {}

  void Open() { ++open_; }
  void Close(int64_t parts = 1);
  int64_t open() const { return open_; }

  // Whether this was the first failure.
  bool Fail(Status status);
  bool failed() const { return !failure_.ok(); }

  // Counts the times of a part that was computed.
  void Add(const Request& part);
  // Sets the whole's outcome and times.
  void ApplyTo(Request& whole) const;

 private:
  const Times times_;
  int64_t open_;
  Status failure_;  // the first; OK while nothing has failed
  TimePoint enqueued_, started_, completed_;
  int64_t batch_requests_ = 0, batch_elements_ = 0;
  int64_t copy_in_ns_ = 0, kernel_ns_ = 0, copy_out_ns_ = 0;
};

}  // namespace attend
