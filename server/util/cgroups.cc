// SPDX-License-Identifier: Apache-2.0

#include "server/util/cgroups.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "kernels/util/processors.h"

namespace attend {
namespace {

// The quota in processors; 0: none.
double Quota(const Cgroup& group) {
  double quota = 0, period = 0;
  if (group.unified) {
    std::ifstream in(group.folder + "/cpu.max");  // "max 100000": no quota
    if (!(in >> quota >> period)) return 0;
  } else {
    std::ifstream quota_us(group.folder + "/cpu.cfs_quota_us");  // -1: no quota
    std::ifstream period_us(group.folder + "/cpu.cfs_period_us");
    if (!(quota_us >> quota) || !(period_us >> period)) return 0;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

std::vector<Cgroup> CgroupsOf(std::string_view controller, const std::string& root) {
  std::vector<Cgroup> found;
  const std::string wanted = "," + std::string(controller) + ",";
  std::ifstream groups(root + "/proc/self/cgroup");
  // hierarchy:controllers:path; version 2 has a single hierarchy, 0, without controllers.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(wanted) == std::string::npos) continue;
    std::string mount = root + "/sys/fs/cgroup";
    if (!unified) mount.append("/").append(controller);
    std::string path = line.substr(second + 1);
    for (; path.size() > 1; path.erase(path.rfind('/'))) found.push_back({mount + path, unified});
    found.push_back({mount, unified});
  }
  return found;
}

int ProcessorsByQuota(const std::string& root) {
  int processors = Processors();
  for (const Cgroup& group : CgroupsOf("cpu", root)) {
    const double quota = Quota(group);
    if (quota <= 0 || quota >= processors) continue;
    processors = std::max(1, static_cast<int>(std::ceil(quota)));
  }
  return processors;
}

}  // namespace attend
