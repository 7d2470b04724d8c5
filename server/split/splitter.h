// SPDX-License-Identifier: Apache-2.0
//
// Runs a large request on several devices. It is replaced by its parts, one for each slice
// (split_plan.h), which are queued, batched and run like any other request, each on its shard's
// device. The whole ends when the last part has ended: with the first failure, which cancels the
// parts that are still queued, or with the answer that the parts wrote into its memory. Times are
// those of the part that ended last.

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
  // How the engine runs parts. All may be called from any thread, also from within each other.
  struct Hooks {
    // Takes as many consecutive ids for parts and returns the first.
    std::function<uint64_t(size_t count)> take_ids;
    // Sends a part to part->device; takes it if and only if OK. It then ends through its responder.
    std::function<Status(std::unique_ptr<Request>& part)> push;
    // Ends a part that is still queued with CANCELLED (or DEADLINE_EXCEEDED).
    std::function<void(int device, uint64_t id)> cancel;
    // Takes the whole, which has ended.
    std::function<void(std::unique_ptr<Request> whole)> finish;
  };

  // `pool` and `metrics` must outlive it, and every part must have ended before its destruction.
  Splitter(HostPool& pool, Metrics& metrics, Hooks hooks);
  ~Splitter();
  Splitter(const Splitter&) = delete;
  Splitter& operator=(const Splitter&) = delete;

  // Splits `request`, whose placement has shards. Returns nothing if it must run as a whole,
  // because the pool has no memory for the parts' blocks or a part has no kernel (the answer's bits
  // may then differ, as they may on other devices). Otherwise takes it if and only if OK, and it
  // ends through Hooks::finish, maybe before this returns. Not OK: no device took the first part.
  // `devices` are equal, one for each shard or more, and shards are offered to them in order. A
  // part that its device refuses (RESOURCE_EXHAUSTED, UNAVAILABLE) is offered to the others before
  // the whole fails.
  std::optional<Status> Submit(std::unique_ptr<Request>& request, std::vector<SplitDevice> devices);

  // Drops the parts of request `id` that are still queued. False if it was not split or has ended.
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
