// SPDX-License-Identifier: Apache-2.0
//
// Ends calls whose clients do not read. The transport keeps an answer and its memory until the
// client has taken it. If a client does not take 1 MiB of its waiting bytes, or all of them if they
// are fewer, within the timeout, the call is cancelled, which releases the memory.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/wire/wire_call.h"

namespace attend {

class AnswerWatch;

// A call as the watch sees it. Watched from Join to Leave; Leave must come before OnDone returns.
class WatchedCall {
 public:
  WatchedCall() = default;
  WatchedCall(const WatchedCall&) = delete;
  WatchedCall& operator=(const WatchedCall&) = delete;

  // `call` must live until Leave; it may have waiting answers. Call once.
  void Join(AnswerWatch& watch, const WireCall& call);
  void Leave();

  // Hold: `bytes`, at least one, start waiting for the client. Release: the client has taken
  // `bytes` of them. Any thread, even after Leave.
  void Hold(int64_t bytes) { held_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void Release(int64_t bytes) {
    taken_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    held_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }

 private:
  friend class AnswerWatch;

  // Whether the client has taken enough bytes for its timeout to restart.
  bool KeepsUp();

  std::atomic<int64_t> held_bytes_{0};
  std::atomic<int64_t> taken_bytes_{0};
  // Used by the watch, under the lock of the call's stripe.
  AnswerWatch* watch_ = nullptr;  // null: not watched
  const WireCall* call_ = nullptr;
  bool cut_off_ = false;
  TimePoint since_;
  int64_t due_bytes_ = 0;  // what taken_bytes_ must reach within a timeout of `since_`
  WatchedCall* next_ = nullptr;
  WatchedCall* previous_ = nullptr;
};

// Held by the call and by each of its answers in the transport.
using WatchedRef = std::shared_ptr<WatchedCall>;

class AnswerWatch {
 public:
  // `unread` is called on the watch's thread with the peer of each cancelled call. With a timeout
  // of 0 no call is cancelled.
  AnswerWatch(Duration timeout, const Clock& clock,
              std::function<void(const std::string& peer)> unread);
  ~AnswerWatch();  // no call may be watched any more
  AnswerWatch(const AnswerWatch&) = delete;
  AnswerWatch& operator=(const AnswerWatch&) = delete;

  // The peers of calls with answers waiting for their clients; empty without a timeout.
  std::vector<std::string> WaitingPeers();

 private:
  friend class WatchedCall;
  // Striped, because calls come and go on many threads.
  static constexpr size_t kStripes = 16;
  struct Stripe {
    Mutex mutex;
    WatchedCall* first ATTEND_GUARDED_BY(mutex) = nullptr;
  };

  Stripe& StripeOf(const WatchedCall* call) {
    return stripes_[reinterpret_cast<uintptr_t>(call) / 64 % kStripes];
  }
  void Run();
  void Look(Stripe& stripe, TimePoint now);

  const Duration timeout_;
  const Clock& clock_;
  const std::function<void(const std::string&)> unread_;
  std::array<Stripe, kStripes> stripes_;
  Mutex mutex_;
  CondVar wake_;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last
};

}  // namespace attend
