// SPDX-License-Identifier: Apache-2.0

#include "server/device/completion.h"

#include <algorithm>
#include <utility>

#include "kernels/util/thread_name.h"

namespace attend {
namespace {

// Up to `count` batches of the same outcome, each with some of the requests, in order.
std::vector<CompletedBatch> Share(CompletedBatch batch, size_t count) {
  const size_t requests = batch.requests.size();
  std::vector<CompletedBatch> shares;
  count = std::min(count, requests);
  if (count <= 1) {
    shares.push_back(std::move(batch));
    return shares;
  }
  const std::vector<Status> statuses = std::move(batch.outcome.statuses);
  batch.outcome.statuses.clear();
  for (size_t n = 0; n < count; ++n) {
    CompletedBatch share{batch.device, {}, batch.outcome};
    for (size_t i = requests * n / count; i < requests * (n + 1) / count; ++i) {
      share.requests.push_back(std::move(batch.requests[i]));
      share.outcome.statuses.push_back(statuses[i]);
    }
    shares.push_back(std::move(share));
  }
  return shares;
}

}  // namespace

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
  std::vector<CompletedBatch> shares = Share(std::move(batch), threads_.size());
  const bool one = shares.size() == 1;
  {
    std::lock_guard lock(mutex_);
    for (CompletedBatch& share : shares) posted_.push_back(std::move(share));
  }
  if (one) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
}

void CompletionThreads::Run() {
  NameThread("attend-answer");
  std::unique_lock<std::mutex> lock(mutex_);
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
