// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/completion_poller.h"

#include <sys/prctl.h>

#include <chrono>
#include <iterator>
#include <utility>

#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/util/thread_name.h"

namespace attend::cuda {
namespace {

constexpr std::chrono::microseconds kPollInterval{10};  // a device works in true time
// Linux may add this much to a sleep; its default of 50 us would be most of a small batch's time.
constexpr unsigned long kTimerSlackNs = 1000;

}  // namespace

CompletionPoller::CompletionPoller(int device) : thread_([this, device] { Run(device); }) {}

CompletionPoller::~CompletionPoller() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
}

void CompletionPoller::Add(cudaEvent_t event, cudaError_t recorded, Finish finish) {
  {
    const MutexLock lock(mutex_);
    added_.push_back({event, recorded, std::move(finish)});
  }
  wake_.NotifyOne();
}

void CompletionPoller::ReportLoss(cudaError_t error) {
  cudaError_t none = cudaSuccess;
  lost_.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

void CompletionPoller::Run(int device) {
  NameThread("attend-gpu-poll");
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) ReportLoss(error);
  std::vector<Pending> pending;
  MutexLock lock(mutex_);
  while (true) {
    while (pending.empty() && added_.empty() && !stop_) wake_.Wait(mutex_);
    std::move(added_.begin(), added_.end(), std::back_inserter(pending));
    added_.clear();
    if (pending.empty()) return;  // stopped
    lock.Unlock();
    if (!Poll(&pending)) std::this_thread::sleep_for(kPollInterval);
    lock.Lock();
  }
}

cudaError_t CompletionPoller::StateOf(cudaEvent_t event, cudaError_t recorded) {
  const cudaError_t lost = lost_.load(std::memory_order_acquire);
  if (lost != cudaSuccess) return lost;
  const cudaError_t error = recorded != cudaSuccess ? recorded : cudaEventQuery(event);
  if (error != cudaSuccess && error != cudaErrorNotReady) {
    (void)cudaGetLastError();
    if (IsSticky(error)) ReportLoss(error);
  }
  return error;
}

bool CompletionPoller::Poll(std::vector<Pending>* pending) {
  bool any = false;
  for (size_t n = 0; n < pending->size();) {
    const cudaError_t error = StateOf((*pending)[n].event, (*pending)[n].recorded);
    if (error == cudaErrorNotReady) {
      ++n;
      continue;
    }
    const Pending ended = std::move((*pending)[n]);
    (*pending)[n] = std::move(pending->back());
    pending->pop_back();
    ended.finish(error);
    any = true;
  }
  return any;
}

}  // namespace attend::cuda
