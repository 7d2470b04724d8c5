// SPDX-License-Identifier: Apache-2.0
//
// Completion threads end the requests of finished batches, so that lanes compute while answers are
// encoded. Encoding an answer and handing it to the transport take place on the thread that ends
// the request, so one thread alone would limit the rate of answers.

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
  // Calls `handler` on any of the `threads`, concurrently, each time with a part of a batch: a
  // batch's requests are spread over the threads, and batches take turns, so that a small batch
  // does not wait for all of a large one. The destructor handles everything posted.
  CompletionThreads(int threads, std::function<void(CompletedBatch)> handler)
      : handler_(std::move(handler)), workers_("attend-answer", threads) {}

  // Thread-safe. Not once the destructor has begun.
  void Post(CompletedBatch batch);
  // The same on the calling thread.
  void Handle(CompletedBatch batch) { handler_(std::move(batch)); }

 private:
  const std::function<void(CompletedBatch)> handler_;
  WorkerThreads workers_;
};

}  // namespace attend
