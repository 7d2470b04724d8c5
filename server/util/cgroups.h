// SPDX-License-Identifier: Apache-2.0
//
// Limits that cgroups (of a container or service) impose on this process.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace attend {

struct Cgroup {
  std::string folder;   // "/sys/fs/cgroup/system.slice"
  bool unified = true;  // cgroup version 2
};

// The cgroups whose limits for a controller, such as "memory", apply to this process: its own and
// all its ancestors. A container that sees itself as the root has its own limit at the root,
// whatever its path. `root` is a prefix for /proc and /sys: "" except in tests.
std::vector<Cgroup> CgroupsOf(std::string_view controller, const std::string& root = "");

// The number of processors this process can use: Processors(), or less if a cgroup's CPU quota is
// lower, rounded up. At least 1.
int ProcessorsByQuota(const std::string& root = "");

}  // namespace attend
