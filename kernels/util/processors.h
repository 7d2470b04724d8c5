// SPDX-License-Identifier: Apache-2.0
//
// Number of processors that this process may use: its CPU affinity mask (taskset, a container's
// cpuset). With more than 1024 processors the mask does not fit, and all of them are counted.

#pragma once

#include <sched.h>

#include <algorithm>
#include <thread>

namespace attend {

// At least 1.
inline int Processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace attend
