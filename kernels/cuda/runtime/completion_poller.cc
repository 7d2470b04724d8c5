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

constexpr std::chrono::microseconds kPollInterval{10};
// Linux may add this much to a sleep; its default of 50 us would be most of a small batch's time.
constexpr unsigned long kTimerSlackNs = 1000;

}  // namespace

CompletionPoller::CompletionPoller(int device) : thread_([this, device] { Run(device); }) {}

CompletionPoller::~CompletionPoller() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void CompletionPoller::Add(cudaEvent_t event, cudaError_t recorded, Finish finish) {
  {
    std::lock_guard lock(mutex_);
    added_.push_back({event, recorded, std::move(finish)});
  }
  wake_.notify_one();
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
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (pending.empty()) wake_.wait(lock, [this] { return stop_ || !added_.empty(); });
    std::move(added_.begin(), added_.end(), std::back_inserter(pending));
    added_.clear();
    if (pending.empty()) return;  // stopped
    lock.unlock();
    if (!Poll(&pending)) std::this_thread::sleep_for(kPollInterval);
    lock.lock();
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
