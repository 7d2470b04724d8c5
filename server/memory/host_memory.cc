// SPDX-License-Identifier: Apache-2.0

#include "server/memory/host_memory.h"

#include <fstream>

#include "kernels/util/host_mapping.h"

namespace attend {
namespace {

// Takes the bound in `file` if it is lower. Text such as "max" is no bound.
void TakeFile(const std::string& folder, const char* file, MemoryLimit& limit) {
  std::ifstream in(folder + "/" + file);
  int64_t bytes = 0;
  if (!(in >> bytes) || bytes <= 0 || bytes >= limit.bytes) return;
  limit = {bytes, "the cgroup " + folder};
}

// Takes the bounds of the group `path` below `mount` and of all its parents. A container that sees
// itself as the root has its own bound at the root, whatever its path is.
void TakeGroups(const std::string& mount, std::string path, const char* file, MemoryLimit& limit) {
  for (; path.size() > 1; path.erase(path.rfind('/'))) TakeFile(mount + path, file, limit);
  TakeFile(mount, file, limit);
}

}  // namespace

MemoryLimit ProcessMemoryLimit(const std::string& root) {
  MemoryLimit limit{PhysicalMemoryBytes(), "the machine"};
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  // hierarchy:controllers:path; version 2 has one hierarchy, 0, without controllers.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      TakeGroups(mount, path, "memory.max", limit);
    } else if (controllers.find(",memory,") != std::string::npos) {
      TakeGroups(mount + "/memory", path, "memory.limit_in_bytes", limit);
    }
  }
  return limit;
}

}  // namespace attend
