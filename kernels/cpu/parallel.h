// SPDX-License-Identifier: Apache-2.0
//
// The loop that the CPU kernels share: items are started strictly in order by the threads of the
// TBB arena that the caller is in.

#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>

#include <atomic>
#include <cstdint>

#include "kernels/contract/stop_flag.h"

namespace attend {

// Calls body(n) for n in [0, count), each once, lower n first; returns when all are done. What the
// body throws ends the loop early and is thrown here; `stop`, once set, ends it early too.
template <class Body>
void ParallelInOrder(int64_t count, const Body& body, const StopFlag* stop = nullptr) {
  // Each task takes the lowest number left, whatever range the partitioner gave it. oneTBB orders
  // what came before the loop, the tasks, and what comes after; release and acquire say so again,
  // at no cost, to race detectors that cannot look into the library.
  std::atomic<int64_t> next;
  next.store(0, std::memory_order_release);
  std::atomic<int64_t> finished{0};
  // A task costs some 100 ns, and what was stopped must not wait for a million of them.
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
