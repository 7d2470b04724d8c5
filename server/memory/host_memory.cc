// SPDX-License-Identifier: Apache-2.0

#include "server/memory/host_memory.h"

#include <fstream>

#include "kernels/util/host_mapping.h"
#include "server/util/cgroups.h"

namespace attend {

MemoryLimit ProcessMemoryLimit(const std::string& root) {
  MemoryLimit limit{PhysicalMemoryBytes(), "the machine"};
  for (const Cgroup& group : CgroupsOf("memory", root)) {
    std::ifstream in(group.folder + (group.unified ? "/memory.max" : "/memory.limit_in_bytes"));
    int64_t bytes = 0;  // "max" and other text: no limit
    if (!(in >> bytes) || bytes <= 0 || bytes >= limit.bytes) continue;
    limit = {bytes, "the cgroup " + group.folder};
  }
  return limit;
}

}  // namespace attend
