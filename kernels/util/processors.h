// SPDX-License-Identifier: Apache-2.0
//
// How many processors this process may use: those that taskset or a container's cpuset leaves it.
// On a machine with more than 1024, all of them.

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
