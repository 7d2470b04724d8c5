// SPDX-License-Identifier: Apache-2.0
//
// The parts of the server that reload on SIGHUP. They register during startup; after that, one
// thread at a time runs all of them. Counts may be read concurrently.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/status.h"

namespace attend {

class ReloadHooks {
 public:
  // Reloads everything it reads or, on error, nothing: the previous state stays.
  using Hook = std::function<Status()>;

  struct Count {
    std::string what;
    int64_t done = 0;
    int64_t failed = 0;
  };

  // `what` names the setting of the file that is read; it is a metric label.
  void Add(std::string what, Hook hook) {
    entries_.emplace_back().what = std::move(what);
    entries_.back().hook = std::move(hook);
  }

  // Runs every hook, even after failures, and reports each to `ended`.
  void Run(const std::function<void(const std::string& what, const Status& status)>& ended) {
    for (Entry& entry : entries_) {
      const Status status = entry.hook();
      (status.ok() ? entry.done : entry.failed).fetch_add(1, std::memory_order_relaxed);
      ended(entry.what, status);
    }
  }

  std::vector<Count> counts() const {
    std::vector<Count> counts;
    for (const Entry& entry : entries_) {
      counts.push_back({entry.what, entry.done.load(std::memory_order_relaxed),
                        entry.failed.load(std::memory_order_relaxed)});
    }
    return counts;
  }

 private:
  struct Entry {
    std::string what;
    Hook hook;
    std::atomic<int64_t> done{0};
    std::atomic<int64_t> failed{0};
  };
  std::list<Entry> entries_;  // a list, so that entries do not move
};

}  // namespace attend
