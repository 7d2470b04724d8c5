// SPDX-License-Identifier: Apache-2.0
//
// The caller of a call that stays open: whether it still has the rights it had when the call began.
// Thread-safe. The call and its facts must outlive it.

#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/call_context.h"

namespace attend {

class StandingCaller {
 public:
  StandingCaller(ServiceContext& context, const WireCall& call, const CallFacts& facts, Scope scope)
      : context_(context), call_(call), facts_(facts), scope_(scope) {}

  // Checks again if rights have changed. A refusal is permanent, and is counted and logged once.
  // May throw std::bad_alloc.
  Status Check() {
    if (context_.authenticator == nullptr) return Status();
    const uint64_t generation = context_.authenticator->generation();
    if (generation == generation_.load(std::memory_order_relaxed)) return Status();
    const MutexLock lock(mutex_);
    if (refused_.ok()) {
      refused_ = RecheckCaller(context_, call_, facts_.method, scope_, facts_.caller);
    }
    if (refused_.ok()) generation_.store(generation, std::memory_order_relaxed);
    return refused_;
  }

 private:
  ServiceContext& context_;
  const WireCall& call_;
  const CallFacts& facts_;
  const Scope scope_;
  std::atomic<uint64_t> generation_{0};  // the authenticator's, when the caller was last accepted
  Mutex mutex_;
  Status refused_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
