// SPDX-License-Identifier: Apache-2.0
//
// Large requests over several devices: each is replaced by its parts (split_plan.h), which are
// queued, batched and run like any others, each on its own device, and ends when the last of them
// has ended: with the first failure, which cancels the parts still queued, or with the answer that
// they wrote into its memory. Times are those of the part that ended last.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kernels/contract/select.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/host_pool.h"
#include "server/metrics/metrics.h"
#include "server/request/request.h"

namespace attend {

struct SplitDevice {
  int index = 0;
  DeviceInfo info;
};

class Splitter {
 public:
  // How the engine runs parts. All may be called from any thread, also from inside of each other.
  struct Hooks {
    // Takes as many consecutive ids for parts and returns the first.
    std::function<uint64_t(size_t count)> take_ids;
    // Sends a part to part->device; takes it if and only if OK. It then ends by its responder.
    std::function<Status(std::unique_ptr<Request>& part)> push;
    // Ends a part that is still queued with CANCELLED (or DEADLINE_EXCEEDED).
    std::function<void(int device, uint64_t id)> cancel;
    // Takes the whole, ended.
    std::function<void(std::unique_ptr<Request> whole)> finish;
  };

  // `pool` and `metrics` must outlive it, and every part must have ended before it goes.
  Splitter(HostPool& pool, Metrics& metrics, Hooks hooks);
  ~Splitter();
  Splitter(const Splitter&) = delete;
  Splitter& operator=(const Splitter&) = delete;

  // Nothing if `request`, whose placement has shards, runs as a whole all the same, because the
  // pool has no memory for the parts' blocks or no kernel for one of them (the answer's bits may
  // differ then, as they may on other devices). Else takes it if and only if OK, and it ends by
  // Hooks::finish, maybe before this returns. Not OK: no device took the first part. `devices` are
  // alike, one for each shard and maybe more, and the shards are offered to them in order; a part
  // that its device refuses (RESOURCE_EXHAUSTED, UNAVAILABLE) is offered to the others before the
  // whole fails.
  std::optional<Status> Submit(std::unique_ptr<Request>& request, std::vector<SplitDevice> devices);

  // Drops the parts of request `id` that are still queued. False if it was not split, or has ended.
  bool Cancel(uint64_t id);

 private:
  class Join;

  void Remove(uint64_t id);

  HostPool& pool_;
  Metrics& metrics_;
  const Hooks hooks_;
  Mutex mutex_;
  // By the whole's id.
  std::unordered_map<uint64_t, std::shared_ptr<Join>> joins_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
