// SPDX-License-Identifier: Apache-2.0
//
// The bounds that cgroups, of a container or a service, set this process.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace attend {

struct Cgroup {
  std::string folder;   // "/sys/fs/cgroup/system.slice"
  bool unified = true;  // version 2
};

// The cgroups whose bounds of that controller, such as "memory", hold for this process: its own and
// all above. A container that sees itself as the root has its own bound at the root, whatever its
// path is. `root` is put before /proc and /sys: "" except in tests.
std::vector<Cgroup> CgroupsOf(std::string_view controller, const std::string& root = "");

// How many processors this process can keep busy: Processors(), or fewer if a cgroup's quota of
// time is lower, rounded up. At least 1.
int ProcessorsByQuota(const std::string& root = "");

}  // namespace attend
