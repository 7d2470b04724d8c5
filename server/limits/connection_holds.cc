// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <utility>

namespace attend {

ConnectionHolds::Open::~Open() {
  if (const std::shared_ptr<ConnectionHolds> all = all_.lock()) all->End(name_);
}

ConnectionHolds::Ref ConnectionHolds::Begin(const std::string& name) {
  const MutexLock lock(mutex_);
  Entry& entry = connections_[name];
  ++entry.opened;
  try {
    return std::make_shared<const Open>(weak_from_this(), name, entry.marks);
  } catch (...) {
    if (--entry.opened == 0) connections_.erase(name);
    throw;
  }
}

Status ConnectionHolds::Call(const std::string& name, int tenant) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found == connections_.end()) return Status();
  std::map<int, CountHold>& tenants = found->second.tenants;
  if (tenants.contains(tenant)) return Status();
  CountHold hold;
  ATTEND_RETURN_IF_ERROR(limits_.Take(tenant, Limit::kConnections, hold));
  tenants.emplace(tenant, std::move(hold));
  found->second.marks->called.store(true, std::memory_order_relaxed);
  return Status();
}

std::shared_ptr<ConnectionMarks> ConnectionHolds::MarksOf(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  return found == connections_.end() ? nullptr : found->second.marks;
}

void ConnectionHolds::CallUncounted(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found != connections_.end())
    found->second.marks->called.store(true, std::memory_order_relaxed);
}

void ConnectionHolds::End(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found != connections_.end() && --found->second.opened == 0) connections_.erase(found);
}

}  // namespace attend
