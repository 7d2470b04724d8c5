// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <atomic>

namespace attend {

void ConnectionHolds::Open::LetIn(const Credential& caller) {
  if (std::ssize(callers_) < kCallersMax) callers_.insert(caller);
  marks_->called.store(true, std::memory_order_relaxed);
}

Status ConnectionHolds::Open::Call(int tenant, const Credential& caller) {
  const MutexLock lock(mutex_);
  if (closed_) return Status();
  if (!tenants_.contains(tenant)) {
    CountHold hold;
    ATTEND_RETURN_IF_ERROR(limits_.Take(tenant, Limit::kConnections, hold));
    tenants_.emplace(tenant, std::move(hold));
  }
  LetIn(caller);
  return Status();
}

void ConnectionHolds::Open::CallUncounted(const Credential& caller) {
  const MutexLock lock(mutex_);
  LetIn(caller);
}

void ConnectionHolds::Open::Close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  tenants_.clear();
}

void ConnectionHolds::Open::Recheck(const std::set<Credential>& credentials) {
  const MutexLock lock(mutex_);
  std::erase_if(callers_, [&](const Credential& caller) {
    return caller != Credential{} && !credentials.contains(caller);
  });
  if (callers_.empty()) marks_->called.store(false, std::memory_order_relaxed);
}

ConnectionHolds::Ref ConnectionHolds::Begin(const std::string& peer) {
  auto open = std::make_shared<Open>(limits_, peer);
  const MutexLock lock(mutex_);
  if (open_.size() >= swept_at_) {
    std::erase_if(open_, [](const auto& each) { return each.expired(); });
    swept_at_ = 2 * open_.size() + 64;
  }
  open_.push_back(open);
  return open;
}

void ConnectionHolds::Recheck(const std::set<Credential>& credentials) {
  const MutexLock lock(mutex_);
  for (const std::weak_ptr<Open>& each : open_) {
    if (const Ref open = each.lock()) open->Recheck(credentials);
  }
}

}  // namespace attend
