// SPDX-License-Identifier: Apache-2.0
//
// This process as the system sees it, read at each scrape under the names of Prometheus's client
// libraries: process_cpu_seconds_total, process_resident_memory_bytes,
// process_virtual_memory_bytes, process_open_fds, process_max_fds and process_threads; zeros
// without /proc. Also attend_heap_used_bytes, from malloc. process_start_time_seconds is in
// Metrics. Thread-safe.

#pragma once

#include <dirent.h>
#include <prometheus/metric_family.h>

#include <memory>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/util/unique_fd.h"

namespace attend {

class ProcessStats {
 public:
  ProcessStats();
  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  struct CloseFolder {
    void operator()(DIR* folder) const { closedir(folder); }
  };
  double CountDescriptors() const ATTEND_REQUIRES(mutex_);

  // Opened at the start, so that a scrape works, and shows it, when no descriptor is left.
  const UniqueFd stat_;
  mutable Mutex mutex_;
  const std::unique_ptr<DIR, CloseFolder> descriptors_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
