// SPDX-License-Identifier: Apache-2.0
//
// Whether a client keeps up: takes what is sent to it, and sends what it has begun. Pure; not
// thread-safe.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/util/clock.h"
#include "server/transport/output_queue.h"
#include "server/util/thresholds.h"

namespace attend {

// Whether a client reads the bytes that wait for it in a queue.
class OutputPace {
 public:
  // Whether the queue was empty, or enough of it has left (thresholds.h), within `timeout`. `more`:
  // further bytes follow once these have left. `restart`: its time begins now. Call it several
  // times per timeout.
  bool Keeps(const OutputQueue& queue, bool more, bool restart, TimePoint now, Duration timeout) {
    const uint64_t waiting = queue.size();
    most_ = std::max(most_, waiting);
    if (waiting == 0) most_ = 0;
    if (restart || waiting == 0 || queue.gone() >= due_) {
      const uint64_t enough =
          std::max(thresholds::kAnswerBytesPerTimeout, most_ / thresholds::kAnswerPartsPerTimeout);
      due_ = queue.gone() + (more ? enough : std::min(enough, waiting));
      since_ = now;
    }
    return now - since_ < timeout;
  }

 private:
  uint64_t most_ = 0;  // bytes that waited since the queue was last empty
  uint64_t due_ = 0;   // what OutputQueue::gone must reach within a timeout of `since_`
  TimePoint since_;
};

// Whether bytes arrive, or leave.
class MessagePace {
 public:
  // Without this many bytes, or the end of a message, within the timeout, it has stalled.
  static constexpr int64_t kProgressBytes = 4096;

  // The time since when fewer than `step` of `bytes`, a growing sum, have arrived. `restart`: now.
  TimePoint Since(int64_t bytes, int64_t step, bool restart, TimePoint now) {
    if (restart || bytes >= due_) {
      due_ = bytes + step;
      since_ = now;
    }
    return since_;
  }
  void Restart() { due_ = 0; }

 private:
  int64_t due_ = 0;
  TimePoint since_;
};

}  // namespace attend
