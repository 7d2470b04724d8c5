// SPDX-License-Identifier: Apache-2.0
//
// Reusable events of one device, because each creation and destruction is a driver call. Without
// timing. Thread-safe.

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

  // Call on a thread whose current device is the pool's. The event's last recording, if any, has
  // been reached. The pointer is shared so that a copyable function can own it; it has one owner.
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

  // Only give back an event that has been reached, or was not recorded since it was taken, and that
  // no stream will be told to wait for. (A new recording does not affect waits already enqueued.)
  // If that is not known, the owner destroys the event instead.
  void Give(std::shared_ptr<CudaEvent> event) {
    const MutexLock lock(mutex_);
    if (idle_.size() < kIdleMax) idle_.push_back(std::move(event));
    // Otherwise it is destroyed with the parameter, after the lock is released.
  }

  // Destroys the idle events. Call on a thread whose current device is the pool's, when all are
  // back.
  void Clear() {
    const MutexLock lock(mutex_);
    idle_.clear();
  }

 private:
  // Enough for some uploads that end at about the same time, with one event per part each. Surplus
  // events are destroyed.
  static constexpr size_t kIdleMax = 256;

  Mutex mutex_;
  std::vector<std::shared_ptr<CudaEvent>> idle_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::cuda
