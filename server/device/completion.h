// SPDX-License-Identifier: Apache-2.0
//
// The completion threads take finished batches from the lanes and end their requests, so that lanes
// go on computing while answers are encoded and sent. gRPC writes small answers to the socket on
// the thread that ends the call, so a single thread would limit the rate of answers.

#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "server/request/request.h"
#include "server/util/worker_threads.h"

namespace attend {

struct CompletedBatch {
  int device = 0;
  std::vector<std::unique_ptr<Request>> requests;
  BatchOutcome outcome;
};

class CompletionThreads {
 public:
  // `handler` is called on any of the `threads`, concurrently, each time with a part of a batch:
  // the batch's requests are spread over the threads, and batches take turns, so that the answers
  // of a small one do not wait for all of a large one's. The destructor handles what was posted.
  CompletionThreads(int threads, std::function<void(CompletedBatch)> handler)
      : handler_(std::move(handler)), workers_("attend-answer", threads) {}

  // Thread-safe. Not after the destructor has begun.
  void Post(CompletedBatch batch);
  // The same on the caller's thread.
  void Handle(CompletedBatch batch) { handler_(std::move(batch)); }

 private:
  const std::function<void(CompletedBatch)> handler_;
  WorkerThreads workers_;
};

}  // namespace attend
