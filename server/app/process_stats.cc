// SPDX-License-Identifier: Apache-2.0

#include "server/app/process_stats.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "server/metrics/make_family.h"
#include "server/net/connection_limits.h"

namespace attend {
namespace {

// Fields of /proc/PID/stat, with proc(5)'s numbers; 3 is the first one after the name.
constexpr int kFirst = 3, kUserTicks = 14, kSystemTicks = 15, kThreads = 20, kVirtualBytes = 23,
              kResidentPages = 24, kLast = 24;
using Fields = std::array<double, kLast + 1>;

Fields ReadStat(const UniqueFd& stat) {
  Fields fields{};
  std::array<char, 1024> bytes;
  const ssize_t got = pread(stat.get(), bytes.data(), bytes.size(), 0);
  if (got <= 0) return fields;
  const std::string_view text(bytes.data(), static_cast<size_t>(got));
  const size_t name_end = text.rfind(')');  // the name may contain any character
  if (name_end == std::string_view::npos) return fields;
  std::istringstream rest{std::string(text.substr(name_end + 1))};
  std::string state;
  rest >> state;
  for (int n = kFirst + 1; n <= kLast; ++n) rest >> fields[static_cast<size_t>(n)];
  return fields;
}

// Bytes that malloc has handed out and not got back.
double HeapBytes() {
  const struct mallinfo2 about = mallinfo2();
  return static_cast<double>(about.uordblks + about.hblkhd);
}

}  // namespace

ProcessStats::ProcessStats()
    : stat_(open("/proc/self/stat", O_RDONLY | O_CLOEXEC)),
      descriptors_(opendir("/proc/self/fd")) {}

double ProcessStats::CountDescriptors() const {
  if (descriptors_ == nullptr) return 0;
  rewinddir(descriptors_.get());
  int64_t count = 0;
  while (const dirent* const entry = readdir(descriptors_.get())) {
    count += entry->d_name[0] != '.' ? 1 : 0;
  }
  return static_cast<double>(count);
}

MetricFamilies ProcessStats::Collect() const {
  const MutexLock lock(mutex_);
  const Fields stat = ReadStat(stat_);
  return {
      FamilyOf(kCounters, "process_cpu_seconds_total",
               "User and system CPU time of the process, over all cores",
               (stat[kUserTicks] + stat[kSystemTicks]) / static_cast<double>(sysconf(_SC_CLK_TCK))),
      FamilyOf(kGauges, "process_resident_memory_bytes",
               "Resident memory of the process, including shared pages",
               stat[kResidentPages] * static_cast<double>(sysconf(_SC_PAGESIZE))),
      FamilyOf(kGauges, "process_virtual_memory_bytes", "Address space of the process",
               stat[kVirtualBytes]),
      FamilyOf(kGauges, "process_open_fds", "Open file descriptors", CountDescriptors()),
      FamilyOf(kGauges, "process_max_fds", "Limit on open file descriptors", DescriptorsMax()),
      FamilyOf(kGauges, "process_threads", "Threads of the process", stat[kThreads]),
      FamilyOf(kGauges, "attend_heap_used_bytes",
               "Memory allocated by malloc and not yet freed; excludes pools and receive buffers",
               HeapBytes())};
}

}  // namespace attend
