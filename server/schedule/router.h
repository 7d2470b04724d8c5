// SPDX-License-Identifier: Apache-2.0
//
// Chooses the device for a request: the one that would finish it first, by the cost that each has
// outstanding. Choosing and counting are one step, so that simultaneous requests do not all find
// the same device idle. Thread-safe.
//
// Cost is Batcher::Cost, the larger of a request's shares of a batch's kernel cost and bytes.
// Devices are assumed to compute it in proportion to their units. A multiprocessor counts as 16
// hardware threads of a CPU. That is between fp32 (some 5) and Tensor Cores (some 50), is rough,
// and matters only to a server that mixes kinds. GPUs of different generations count by their
// multiprocessors alone.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/select.h"
#include "kernels/util/mutex.h"
#include "server/request/placement.h"

namespace attend {

class Router {
 public:
  // `devices` are in the engine's order.
  explicit Router(const std::vector<DeviceInfo>& devices);

  // Chooses the candidate with the smallest (outstanding + cost) / speed, the first of several; its
  // cost is outstanding from now on. `candidates` must not be empty.
  size_t Reserve(std::span<const Candidate> candidates);
  // The same for a given device.
  void Add(int device, int64_t cost);
  // The cost that was added has left the device, or never reached it.
  void Release(int device, int64_t cost);

  // Reserve's choice for a request whose bytes are still to arrive, which may take its client long.
  // Its cost is expected on the device until Forget, and counts only for other such requests.
  size_t Expect(std::span<const Candidate> candidates);
  // Takes back that cost.
  void Forget(int device, int64_t cost);

  int64_t outstanding(int device) const;

 private:
  struct Load {
    int64_t outstanding = 0;
    int64_t expected = 0;
  };

  // The first of those with the smallest time, where `cost_of` says what a load costs.
  template <class CostOf>
  size_t BestLocked(std::span<const Candidate> candidates, const CostOf& cost_of) const
      ATTEND_REQUIRES(mutex_);

  std::vector<double> speeds_;  // of the devices
  mutable Mutex mutex_;
  std::vector<Load> loads_ ATTEND_GUARDED_BY(mutex_);  // the same
};

}  // namespace attend
