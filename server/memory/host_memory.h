// SPDX-License-Identifier: Apache-2.0
//
// How much memory this process may have: the machine's, or less if a cgroup (of a container or
// service) limits it.

#pragma once

#include <cstdint>
#include <string>

namespace attend {

struct MemoryLimit {
  int64_t bytes = 0;
  std::string whose;  // "the machine", "the cgroup /sys/fs/cgroup/system.slice"
};

// `root` is put before /proc and /sys: "" except in tests.
MemoryLimit ProcessMemoryLimit(const std::string& root = "");

}  // namespace attend
