// SPDX-License-Identifier: Apache-2.0
//
// The counters are atomics that the transport changes without a lock; the watch's thread samples
// them. A call keeps up if nothing is waiting, or if taken_bytes_ has reached the goal set when its
// timeout last restarted. The goal is at most what was waiting then, so a client is never asked for
// more than it was sent.

#include "server/wire/answer_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"
#include "server/memory/memory_reserve.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

// Checks per timeout: a call ends at most an eighth of it late.
constexpr int kLooksPerTimeout = 8;

}  // namespace

void WatchedCall::Join(AnswerWatch& watch, const WireCall& call) {
  if (watch.timeout_ == Duration::zero()) return;
  AnswerWatch::Stripe& stripe = watch.StripeOf(this);
  const MutexLock lock(stripe.mutex);
  watch_ = &watch;
  call_ = &call;
  next_ = stripe.first;
  if (next_ != nullptr) next_->previous_ = this;
  stripe.first = this;
}

void WatchedCall::Leave() {
  if (watch_ == nullptr) return;
  AnswerWatch::Stripe& stripe = watch_->StripeOf(this);
  const MutexLock lock(stripe.mutex);
  (previous_ == nullptr ? stripe.first : previous_->next_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  watch_ = nullptr;
}

bool WatchedCall::KeepsUp() {
  const int64_t held = held_bytes_.load(std::memory_order_relaxed);
  const int64_t taken = taken_bytes_.load(std::memory_order_relaxed);
  if (held > 0 && taken < due_bytes_) return false;
  due_bytes_ = taken + std::min(held, thresholds::kAnswerBytesPerTimeout);
  return true;
}

AnswerWatch::AnswerWatch(Duration timeout, const Clock& clock,
                         std::function<void(const std::string& peer)> unread)
    : timeout_(timeout), clock_(clock), unread_(std::move(unread)) {
  if (timeout_ > Duration::zero()) thread_ = std::thread([this] { Run(); });
}

AnswerWatch::~AnswerWatch() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

std::vector<std::string> AnswerWatch::WaitingPeers() {
  std::vector<std::string> peers;
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);  // so that no call leaves
    for (WatchedCall* each = stripe.first; each != nullptr; each = each->next_) {
      if (each->held_bytes_.load(std::memory_order_relaxed) == 0) continue;
      // Must not wait for memory: calls that would free some wait for this lock.
      if (!TryAllocating([&] { peers.push_back(each->call_->Peer()); })) return peers;
    }
  }
  return peers;
}

void AnswerWatch::Run() {
  NameThread("attend-unread");
  const Duration pause =
      std::max<Duration>(timeout_ / kLooksPerTimeout, std::chrono::milliseconds(1));
  const MutexLock lock(mutex_);
  while (!stop_) {
    const TimePoint now = clock_.Now();
    for (Stripe& stripe : stripes_) Look(stripe, now);
    while (!stop_ && clock_.WaitUntil(wake_, mutex_, now + pause)) {
    }
  }
}

void AnswerWatch::Look(Stripe& stripe, TimePoint now) {
  std::vector<std::string> unread;
  {
    const MutexLock lock(stripe.mutex);
    for (WatchedCall* each = stripe.first; each != nullptr; each = each->next_) {
      if (each->KeepsUp()) each->since_ = now;
      if (each->cut_off_ || now - each->since_ < timeout_) continue;
      if (!TryAllocating([&] { unread.push_back(each->call_->Peer()); })) {
        break;  // retried at the next check
      }
      each->cut_off_ = true;
      each->call_->Cancel();
    }
  }
  for (const std::string& peer : unread) {
    TryAllocating([&] { unread_(peer); });  // otherwise cancelled without a report
  }
}

}  // namespace attend
