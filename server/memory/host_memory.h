// SPDX-License-Identifier: Apache-2.0
//
// How much memory this process may have: the machine's, or less if a cgroup (a container's, a
// service's) bounds it.

#pragma once

#include <cstdint>
#include <string>

namespace attend {

struct MemoryLimit {
  int64_t bytes = 0;
  std::string whose;  // "the machine", "the cgroup /sys/fs/cgroup/system.slice"
};

// `root` stands before /proc and /sys: "" but in tests.
MemoryLimit ProcessMemoryLimit(const std::string& root = "");

}  // namespace attend
