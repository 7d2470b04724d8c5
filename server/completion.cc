// SPDX-License-Identifier: Apache-2.0

#include "server/completion.h"

#include <utility>

namespace attend {

CompletionThread::CompletionThread(std::function<void(CompletedBatch)> handler)
    : handler_(std::move(handler)), thread_([this] { Run(); }) {}

CompletionThread::~CompletionThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void CompletionThread::Post(CompletedBatch batch) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(batch));
  }
  wake_.notify_one();
}

void CompletionThread::Run() {
  std::vector<CompletedBatch> taken;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !posted_.empty(); });
      if (posted_.empty()) return;
      taken.swap(posted_);
    }
    for (CompletedBatch& batch : taken) handler_(std::move(batch));
    taken.clear();
  }
}

}  // namespace attend
