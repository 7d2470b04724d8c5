// SPDX-License-Identifier: Apache-2.0
//
// A call of the server to itself each second, within the process, which the threads answer that
// answer all calls. While it waits nothing else is asked: load makes it late, and only threads that
// stand still leave it without an answer.

#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/util/poll_thread.h"

namespace attend {

class Heartbeat {
 public:
  // Far longer than calls wait on a server that has too much to do.
  static constexpr int kUnansweredSecondsMax = 30;

  // `channel` leads to a server that answers grpc.health.v1. `clock` must outlive the object.
  Heartbeat(const std::shared_ptr<grpc::Channel>& channel, const Clock& clock);
  // Gives up the call, whose end it waits for.
  ~Heartbeat();

  // For how long the call has had no answer, in seconds that this process has run: one that is
  // stopped or suspended has no time to answer. Thread-safe, and so is the next.
  int unanswered_seconds() const { return unanswered_.load(std::memory_order_relaxed); }
  bool beats() const { return unanswered_seconds() < kUnansweredSecondsMax; }

 private:
  struct Call;
  struct Health;
  void Beat();
  static std::unique_ptr<Call> MakeCall();  // null: no memory

  const std::unique_ptr<Health> health_;
  std::atomic<int> unanswered_{0};
  Mutex mutex_;
  CondVar answered_;
  // Null: there is none. Its answer is any end: what counts is that a thread came to it.
  std::unique_ptr<Call> call_ ATTEND_GUARDED_BY(mutex_);
  std::unique_ptr<PollThread> thread_;
};

}  // namespace attend
