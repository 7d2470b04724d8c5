// SPDX-License-Identifier: Apache-2.0

#include "server/completion.h"

#include <algorithm>
#include <utility>

namespace attend {

CompletionThreads::CompletionThreads(int threads, std::function<void(CompletedBatch)> handler)
    : handler_(std::move(handler)) {
  for (int i = 0; i < std::max(1, threads); ++i) threads_.emplace_back([this] { Run(); });
}

CompletionThreads::~CompletionThreads() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CompletionThreads::Post(CompletedBatch batch) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(batch));
  }
  wake_.notify_one();
}

void CompletionThreads::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !posted_.empty(); });
    if (posted_.empty()) return;
    CompletedBatch batch = std::move(posted_.front());
    posted_.pop_front();
    lock.unlock();
    handler_(std::move(batch));
    lock.lock();
  }
}

}  // namespace attend
