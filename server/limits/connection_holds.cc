// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <utility>

namespace attend {

ConnectionHolds::Open::~Open() {
  if (const std::shared_ptr<ConnectionHolds> all = all_.lock()) all->End(name_);
}

ConnectionHolds::Ref ConnectionHolds::Begin(const std::string& name, const std::string& peer) {
  const MutexLock lock(mutex_);
  Entry& entry = connections_[name];
  ++entry.opened;
  try {
    if (entry.opened == 1) entry.marks->peer = peer;
    return std::make_shared<const Open>(weak_from_this(), name, entry.marks);
  } catch (...) {
    if (--entry.opened == 0) connections_.erase(name);
    throw;
  }
}

void ConnectionHolds::LetIn(Entry& entry, const Credential& caller) {
  if (std::ssize(entry.callers) < kCallersMax) entry.callers.insert(caller);
  entry.marks->called.store(true, std::memory_order_relaxed);
}

Status ConnectionHolds::Call(const std::string& name, int tenant, const Credential& caller) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found == connections_.end()) return Status();
  std::map<int, CountHold>& tenants = found->second.tenants;
  if (!tenants.contains(tenant)) {
    CountHold hold;
    ATTEND_RETURN_IF_ERROR(limits_.Take(tenant, Limit::kConnections, hold));
    tenants.emplace(tenant, std::move(hold));
  }
  LetIn(found->second, caller);
  return Status();
}

std::shared_ptr<ConnectionMarks> ConnectionHolds::MarksOf(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  return found == connections_.end() ? nullptr : found->second.marks;
}

void ConnectionHolds::CallUncounted(const std::string& name, const Credential& caller) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found != connections_.end()) LetIn(found->second, caller);
}

void ConnectionHolds::Recheck(const std::set<Credential>& credentials) {
  const MutexLock lock(mutex_);
  for (auto& [name, entry] : connections_) {
    std::erase_if(entry.callers, [&](const Credential& caller) {
      return caller != Credential{} && !credentials.contains(caller);
    });
    if (entry.callers.empty()) entry.marks->called.store(false, std::memory_order_relaxed);
  }
}

void ConnectionHolds::End(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found != connections_.end() && --found->second.opened == 0) connections_.erase(found);
}

}  // namespace attend
