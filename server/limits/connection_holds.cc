// SPDX-License-Identifier: Apache-2.0

#include "server/limits/connection_holds.h"

#include <utility>

namespace attend {

ConnectionHolds::Open::~Open() {
  if (const std::shared_ptr<ConnectionHolds> all = all_.lock()) all->End(name_);
}

ConnectionHolds::Ref ConnectionHolds::Begin(const std::string& name) {
  auto open = std::make_shared<const Open>(weak_from_this(), name);
  const MutexLock lock(mutex_);
  ++connections_[name].opened;
  return open;
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
  return Status();
}

void ConnectionHolds::End(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto found = connections_.find(name);
  if (found != connections_.end() && --found->second.opened == 0) connections_.erase(found);
}

}  // namespace attend
