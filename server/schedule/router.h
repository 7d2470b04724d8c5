// SPDX-License-Identifier: Apache-2.0
//
// Chooses the device for a request: the one that would finish it first, given the outstanding cost
// of each. Choosing and counting are one atomic step, so that simultaneous requests do not all find
// the same device idle. Thread-safe.
//
// Cost is Batcher::Cost, the larger of a request's shares of a batch's kernel cost and bytes. A
// device's speed is taken as proportional to its units, and a multiprocessor counts as 16 hardware
// threads of a CPU. That is rough, between fp32 (about 5) and Tensor Cores (about 50), and matters
// only to a server with both kinds of device. GPUs of different generations are compared by their
// number of multiprocessors alone.

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

  // Chooses the candidate with the smallest (outstanding + cost) / speed, the first one on ties,
  // and adds its cost to that device. `candidates` must not be empty.
  size_t Reserve(std::span<const Candidate> candidates);
  // Adds the cost to a given device.
  void Add(int device, int64_t cost);
  // The request has left the device, or never reached it.
  void Release(int device, int64_t cost);

  // Like Reserve, for a request whose bytes are still arriving, at the client's pace. Until Forget,
  // its cost counts only against other such requests.
  size_t Expect(std::span<const Candidate> candidates);
  // Removes the cost that Expect added.
  void Forget(int device, int64_t cost);

  int64_t outstanding(int device) const;

 private:
  struct Load {
    int64_t outstanding = 0;
    int64_t expected = 0;
  };

  // The candidate with the smallest finishing time, the first one on ties; `cost_of` maps a load to
  // its cost.
  template <class CostOf>
  size_t BestLocked(std::span<const Candidate> candidates, const CostOf& cost_of) const
      ATTEND_REQUIRES(mutex_);

  std::vector<double> speeds_;  // by device
  mutable Mutex mutex_;
  std::vector<Load> loads_ ATTEND_GUARDED_BY(mutex_);  // by device
};

}  // namespace attend
