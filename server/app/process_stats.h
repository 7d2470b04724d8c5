// SPDX-License-Identifier: Apache-2.0
//
// What the system says of this process, read at each scrape under the names that Prometheus's
// clients have for it: process_cpu_seconds_total, process_resident_memory_bytes,
// process_virtual_memory_bytes, process_open_fds, process_max_fds and process_threads; zeros where
// there is no /proc. And what malloc says: attend_heap_used_bytes. process_start_time_seconds is in
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

  // Open from the start: a scrape may come when no descriptor is left, and should say so.
  const UniqueFd stat_;
  mutable Mutex mutex_;
  const std::unique_ptr<DIR, CloseFolder> descriptors_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
