// SPDX-License-Identifier: Apache-2.0
//
// Threads that copy the bytes of large messages to their places, so that gRPC's few threads never
// spend long in a memcpy. One copy is split by bytes over the threads. Copies take turns, so that a
// short one waits at most for a part of a long one.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"

namespace attend {

class CopyPool {
 public:
  explicit CopyPool(int threads);
  ~CopyPool();  // finishes what was posted, then joins
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Copies all pieces, then calls `done` once on a thread of the pool. Thread-safe; never waits.
  void Copy(const std::vector<HostPiece>& pieces, std::function<void()> done);

 private:
  struct Job;

  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<std::shared_ptr<Job>> jobs_;  // with parts that no thread has begun; taken in turn
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace attend
