// SPDX-License-Identifier: Apache-2.0
//
// The thread of a CUDA backend that detects completed batches: it polls their last events, and
// sleeps while nothing is outstanding. It does not use cudaLaunchHostFunc, which does not run once
// the context is lost: a lost batch must end too.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/util/mutex.h"

namespace attend::cuda {

class CompletionPoller {
 public:
  // Called once, on the poller's thread, when `event` was reached or the device failed.
  using Finish = std::function<void(cudaError_t error)>;

  explicit CompletionPoller(int device);
  ~CompletionPoller();  // completes what is outstanding first
  CompletionPoller(const CompletionPoller&) = delete;
  CompletionPoller& operator=(const CompletionPoller&) = delete;

  // Any thread. `recorded` is what cudaEventRecord returned; a failure finishes at once.
  void Add(cudaEvent_t event, cudaError_t recorded, Finish finish);

  // Whether `event`, whose recording returned `recorded`, has been reached; cudaErrorNotReady if
  // not yet. Any thread whose current device is the event's. Reports a loss.
  cudaError_t StateOf(cudaEvent_t event, cudaError_t recorded);

  // Whether some call has shown that the device's context is lost.
  bool device_lost() const { return lost_.load(std::memory_order_acquire) != cudaSuccess; }
  // Records the first sticky error; later ones are ignored. Any thread.
  void ReportLoss(cudaError_t error);

 private:
  struct Pending {
    cudaEvent_t event;
    cudaError_t recorded;
    Finish finish;
  };

  void Run(int device);
  // Finishes what has completed; false if nothing has.
  bool Poll(std::vector<Pending>* pending);

  Mutex mutex_;
  CondVar wake_;
  std::vector<Pending> added_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::atomic<cudaError_t> lost_{cudaSuccess};
  std::thread thread_;  // last: it uses the rest
};

}  // namespace attend::cuda
