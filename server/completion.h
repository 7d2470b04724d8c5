// SPDX-License-Identifier: Apache-2.0
//
// The completion thread: takes finished batches from the lanes and ends their requests, so that
// lanes go on computing while answers are encoded and sent.

#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "server/request.h"

namespace attend {

struct CompletedBatch {
  int device = 0;
  std::vector<std::unique_ptr<Request>> requests;
  BatchOutcome outcome;
};

class CompletionThread {
 public:
  explicit CompletionThread(std::function<void(CompletedBatch)> handler);
  ~CompletionThread();  // handles what was posted, then joins

  // Any thread. Not after the destructor has begun.
  void Post(CompletedBatch batch);

 private:
  void Run();

  const std::function<void(CompletedBatch)> handler_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<CompletedBatch> posted_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace attend
