// SPDX-License-Identifier: Apache-2.0
//
// The parallel loop of the CPU kernels. The threads of the caller's TBB arena start items strictly
// in order.

#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>

#include <atomic>
#include <cstdint>

#include "kernels/contract/stop_flag.h"

namespace attend {

// Calls body(n) once for each n in [0, count), lower n first, and returns when all are done. Ends
// early if the body throws, which is rethrown here, or once `stop` is set.
template <class Body>
void ParallelInOrder(int64_t count, const Body& body, const StopFlag* stop = nullptr) {
  // Each task takes the lowest number left, whatever range the partitioner gave it. oneTBB already
  // orders what precedes the loop, the tasks, and what follows. Release and acquire repeat it, at
  // no cost, for race detectors that cannot see into the library.
  std::atomic<int64_t> next;
  next.store(0, std::memory_order_release);
  std::atomic<int64_t> finished{0};
  // A task costs about 100 ns; a stopped loop must not spend that a million times.
  constexpr int64_t kTasksMax = 1 << 14;
  tbb::parallel_for(
      tbb::blocked_range<int64_t>(0, count, 1 + count / kTasksMax),
      [&](const tbb::blocked_range<int64_t>& range) {
        for (int64_t n = range.begin(); n < range.end() && !Stopped(stop); ++n) {
          body(next.fetch_add(1, std::memory_order_acq_rel));
          finished.fetch_add(1, std::memory_order_release);
        }
      },
      tbb::simple_partitioner());
  static_cast<void>(finished.load(std::memory_order_acquire));
}

}  // namespace attend
