// SPDX-License-Identifier: Apache-2.0
//
// Events of one device that are used again and again, as making one and destroying it is the
// driver's business each time. They measure no time. Thread-safe.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda_event.h"
#include "kernels/util/mutex.h"

namespace attend::cuda {

class EventPool {
 public:
  EventPool() { idle_.reserve(kIdleMax); }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // On a thread whose device is the pool's. What was recorded in the event before, if anything, has
  // been reached. Shared, so that a function that can be copied may own it; it has one owner.
  cudaError_t Take(std::shared_ptr<CudaEvent>* event) {
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        *event = std::move(idle_.back());
        idle_.pop_back();
        return cudaSuccess;
      }
    }
    cudaEvent_t made = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    if (error == cudaSuccess) *event = std::make_shared<CudaEvent>(made);
    return error;
  }

  // Only what has been reached, or was not recorded since it was taken, and what nobody will ask a
  // stream to wait for: waits that a stream already has are not changed by the next recording. An
  // event of which that is not known is destroyed by its owner instead.
  void Give(std::shared_ptr<CudaEvent> event) {
    const MutexLock lock(mutex_);
    if (idle_.size() < kIdleMax) idle_.push_back(std::move(event));
    // Else it goes with the parameter, behind the lock.
  }

  // Destroys what is idle. On a thread whose device is the pool's, when all have been given back.
  void Clear() {
    const MutexLock lock(mutex_);
    idle_.clear();
  }

 private:
  // Of some uploads that end at about the same time, each with a mark for each of its parts; more
  // than these are destroyed.
  static constexpr size_t kIdleMax = 256;

  Mutex mutex_;
  std::vector<std::shared_ptr<CudaEvent>> idle_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::cuda
