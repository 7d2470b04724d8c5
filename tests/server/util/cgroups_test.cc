// SPDX-License-Identifier: Apache-2.0

#include "server/util/cgroups.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/util/processors.h"

namespace attend {
namespace {

class CgroupsTest : public ::testing::Test {
 protected:
  ~CgroupsTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_ = ::testing::TempDir() + "attend_cgroups_" + std::to_string(getpid());
};

TEST_F(CgroupsTest, ListsTheProcesssCgroupAndItsParents) {
  EXPECT_TRUE(CgroupsOf("cpu", root_).empty());
  Write("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/b\n0::/c/d\nnonsense\n");
  std::string folders;
  for (const Cgroup& group : CgroupsOf("cpu", root_)) {
    folders += group.folder.substr(root_.size()) + (group.unified ? "+ " : " ");
  }
  EXPECT_EQ(folders,
            "/sys/fs/cgroup/cpu/a /sys/fs/cgroup/cpu /sys/fs/cgroup/c/d+ /sys/fs/cgroup/c+ "
            "/sys/fs/cgroup+ ");
}

TEST_F(CgroupsTest, TheLowestQuotaApplies) {
  const int all = Processors();
  EXPECT_EQ(ProcessorsByQuota(root_), all);
  Write("proc/self/cgroup", "3:cpu:/a\n0::/c/d\n");
  Write("sys/fs/cgroup/c/d/cpu.max", "max 100000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), all);
  Write("sys/fs/cgroup/c/cpu.max", "99900000 100000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), std::min(all, 999));
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), std::min(all, 999));
  Write("sys/fs/cgroup/c/cpu.max", "100001 100000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), std::min(all, 2));
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "30000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), 1);
  Write("sys/fs/cgroup/c/cpu.max", "0 100000\n");
  EXPECT_EQ(ProcessorsByQuota(root_), 1);
}

}  // namespace
}  // namespace attend
