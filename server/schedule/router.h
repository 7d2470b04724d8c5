// SPDX-License-Identifier: Apache-2.0
//
// Which device a request goes to: the one that would be done with it first, by the cost that each
// has outstanding. Choosing and counting are one step, so that requests that come at once do not
// all find the same device idle. Thread-safe.
//
// Cost is Batcher::Cost, the larger of the parts that a request takes of a batch's kernel cost and
// bytes.
// Devices work it off in proportion to their units; a multiprocessor counts as 16 hardware threads
// of a CPU, which lies between fp32 (some 5) and Tensor Cores (some 50), is rough, and matters only
// to a server that mixes kinds. GPUs of different generations count by their multiprocessors alone.

#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/contract/select.h"

namespace attend {

// A device that can run a request, and what the request costs it.
struct Candidate {
  int device = 0;
  Selection selection;
  double kernel_cost = 0;  // kernels/contract/cost.h
  int64_t cost = 0;        // Batcher::Cost
};

class Router {
 public:
  // One for each device, in the engine's order.
  explicit Router(const std::vector<DeviceInfo>& devices);

  // The candidate with the smallest (outstanding + cost) / speed, the first of several; its cost is
  // outstanding from now on. `candidates` is not empty.
  size_t Reserve(std::span<const Candidate> candidates);
  // The same where the device is given.
  void Add(int device, int64_t cost);
  // What was added has left the device, or never reached it.
  void Release(int device, int64_t cost);

  // What a cost counts for: sums of as many as any queue can hold fit 64 bits.
  static int64_t BoundedCost(int64_t cost);

  // Reserve's choice for a request whose bytes are still to come, which may take its client long:
  // its cost is expected of the device until Forget, and counts for other such requests only.
  size_t Expect(std::span<const Candidate> candidates);
  // Of that cost, as it counts, or a part of it.
  void Forget(int device, int64_t cost);

  int64_t outstanding(int device) const;

  // Of the candidates, those on devices that are alike in kind, compute capability and units: the
  // fastest such group, the first of several. Load plays no part.
  std::vector<Candidate> Alike(std::span<const Candidate> candidates) const;

 private:
  struct Device {
    DeviceInfo info;
    double speed = 1;
    int64_t outstanding = 0;
    int64_t expected = 0;
  };

  // The first of those with the smallest time, where `load_of` is what a device has before it.
  template <class LoadOf>
  size_t BestLocked(std::span<const Candidate> candidates, const LoadOf& load_of) const;

  mutable std::mutex mutex_;  // of `outstanding` and `expected`
  std::vector<Device> devices_;
};

}  // namespace attend
