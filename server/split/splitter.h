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
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "kernels/contract/select.h"
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
    // Sends a part to part->device; takes it if and only if OK. It then ends by its responder.
    std::function<Status(std::unique_ptr<Request>& part)> push;
    // Ends a part that is still queued with CANCELLED (or DEADLINE_EXCEEDED).
    std::function<void(int device, uint64_t id)> cancel;
    // Takes the whole, ended.
    std::function<void(std::unique_ptr<Request> whole)> finish;
  };

  // Requests of more than `flops_min` are split; 0: none. `pool` and `metrics` must outlive it, and
  // every part must have ended before it goes.
  Splitter(double flops_min, HostPool& pool, Metrics& metrics, Hooks hooks);
  ~Splitter();
  Splitter(const Splitter&) = delete;
  Splitter& operator=(const Splitter&) = delete;

  // Nothing if `request`, whose flops and check are set, runs as a whole: it is small, the devices
  // are fewer than two, its problem has no plan, or the pool has no memory for the parts' blocks
  // (the answer's bits may differ then, as they may on other devices). Else takes it if and only if
  // OK, and it ends by Hooks::finish, maybe before this returns. Not OK: no device took the first
  // part. `devices` are alike, and the shares are offered to them in order; a part that its device
  // refuses (RESOURCE_EXHAUSTED, UNAVAILABLE) is offered to the others before the whole fails.
  std::optional<Status> Submit(std::unique_ptr<Request>& request,
                               std::span<const SplitDevice> devices);

  // Drops the parts of request `id` that are still queued. False if it was not split, or has ended.
  bool Cancel(uint64_t id);

 private:
  class Join;

  void Remove(uint64_t id);

  const double flops_min_;
  HostPool& pool_;
  Metrics& metrics_;
  const Hooks hooks_;
  std::mutex mutex_;
  uint64_t next_id_;
  std::unordered_map<uint64_t, std::shared_ptr<Join>> joins_;  // by the whole's id
};

}  // namespace attend
