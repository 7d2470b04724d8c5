// SPDX-License-Identifier: Apache-2.0
//
// Counts open calls, in total and per peer. An open call holds memory for as long as its client
// wants, even if nothing is sent on it. Thread-safe.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "kernels/util/mutex.h"

namespace attend {

class OpenCalls : public std::enable_shared_from_this<OpenCalls> {
 public:
  // Shared by the connections of one peer; lives as long as one of them.
  class Peer {
   public:
    Peer(std::shared_ptr<OpenCalls> all, std::string name)
        : all_(std::move(all)), name_(std::move(name)) {}
    ~Peer() { all_->Forget(name_); }
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    // Counts another call and returns null; or returns the bound that it would exceed, and counts
    // nothing.
    const char* Begin();
    void End(int64_t calls) {
      calls_.fetch_sub(calls, std::memory_order_relaxed);
      all_->calls_.fetch_sub(calls, std::memory_order_relaxed);
    }

   private:
    const std::shared_ptr<OpenCalls> all_;
    const std::string name_;
    std::atomic<int64_t> calls_{0};
  };

  OpenCalls(int64_t most, int64_t per_peer_max) : most_(most), per_peer_max_(per_peer_max) {}

  std::shared_ptr<Peer> Of(const std::string& peer);
  int64_t Count() const { return calls_.load(std::memory_order_relaxed); }

 private:
  // An eighth of all calls is reserved for peers that have less than a 64th of them.
  static constexpr int64_t kKept = 8, kFew = 64;

  void Forget(const std::string& peer);

  const int64_t most_;
  const int64_t per_peer_max_;
  std::atomic<int64_t> calls_{0};
  Mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<Peer>> peers_ ATTEND_GUARDED_BY(mutex_);
};

inline const char* OpenCalls::Peer::Begin() {
  const int64_t before = calls_.fetch_add(1, std::memory_order_relaxed);
  if (before >= all_->per_peer_max_) {
    calls_.fetch_sub(1, std::memory_order_relaxed);
    return "more open calls than --max-calls-per-peer allows";
  }
  // The reserve: peers with many calls may not use the last eighth.
  const bool few = before < std::max<int64_t>(1, all_->most_ / kFew);
  const int64_t most = few ? all_->most_ : all_->most_ - all_->most_ / kKept;
  if (all_->calls_.fetch_add(1, std::memory_order_relaxed) < most) return nullptr;
  End(1);
  return "more open calls than --max-calls allows";
}

inline std::shared_ptr<OpenCalls::Peer> OpenCalls::Of(const std::string& peer) {
  const MutexLock lock(mutex_);
  std::weak_ptr<Peer>& known = peers_[peer];
  std::shared_ptr<Peer> shared = known.lock();
  if (shared == nullptr) {
    shared = std::make_shared<Peer>(shared_from_this(), peer);
    known = shared;
  }
  return shared;
}

inline void OpenCalls::Forget(const std::string& peer) {
  const MutexLock lock(mutex_);
  const auto found = peers_.find(peer);  // the peer may have reconnected
  if (found != peers_.end() && found->second.expired()) peers_.erase(found);
}

}  // namespace attend
