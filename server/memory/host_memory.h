// SPDX-License-Identifier: Apache-2.0
//
// The memory limit of this process: the machine's memory, or less under a cgroup (a container or
// service).

#pragma once

#include <cstdint>
#include <string>

namespace attend {

struct MemoryLimit {
  int64_t bytes = 0;
  std::string whose;  // "the machine", "the cgroup /sys/fs/cgroup/system.slice"
};

// `root` is prepended to /proc and /sys; empty except in tests.
MemoryLimit ProcessMemoryLimit(const std::string& root = "");

}  // namespace attend
