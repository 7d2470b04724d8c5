// SPDX-License-Identifier: Apache-2.0
//
// Who gets room for a region, who gives it up, and who may wait for it.

#include <algorithm>
#include <cassert>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/regions/region_registry.h"
#include "server/util/weight_share.h"

namespace attend {
namespace {

Status Full(int64_t bytes, const std::string& why) {
  return ResourceExhausted("a region of " + std::to_string(bytes) + " bytes: " + why);
}

}  // namespace

int64_t RegionRegistry::ShareOf(int tenant) const {
  return attend::ShareOf(limits_.tenant_weights, tenant, limits_.bytes_max);
}

Status RegionRegistry::CheckClientLocked(const Client& client, int64_t bytes) const {
  if (client.regions >= limits_.client_regions_max) {
    return ResourceExhausted("the connection has " + std::to_string(client.regions) +
                             " regions, may have at most " +
                             std::to_string(limits_.client_regions_max));
  }
  if (bytes > limits_.client_bytes_max - client.bytes) {
    return Full(bytes, std::to_string(client.bytes) +
                           " of the connection's bound (shared-memory-client-max), " +
                           std::to_string(limits_.client_bytes_max) + ", are in use");
  }
  return Status();
}

Status RegionRegistry::CheckLocked(const Client& client, int64_t bytes) const {
  ATTEND_RETURN_IF_ERROR(CheckClientLocked(client, bytes));
  int64_t left = limits_.bytes_max - bytes_.held();
  if (!WithinShareLocked(client, bytes))
    left -= bytes_.others + ClaimedLocked(client, std::nullopt);
  if (bytes <= std::max<int64_t>(0, left)) return Status();
  // How much others use is told by the metrics alone.
  const Bytes& has = tenant_bytes_[TenantOf(client.tenant)];
  std::string why = "the bound of all regions (shared-memory-max), " +
                    std::to_string(limits_.bytes_max) + ", has too little left; the tenant has " +
                    std::to_string(has.held()) + ", its share is " +
                    std::to_string(ShareOf(TenantOf(client.tenant)));
  if (has.others > 0) {
    why += "; it has not released " + std::to_string(has.others) + " that made room for others";
  }
  return Full(bytes, why);
}

int64_t RegionRegistry::ClaimedLocked(const Client& except, std::optional<int> tenant) const {
  int64_t bytes = 0;
  for (const auto& [number, each] : clients_) {
    if (&each == &except || each.claimed_bytes == 0) continue;
    if (!tenant || TenantOf(each.tenant) == *tenant) bytes += each.claimed_bytes;
  }
  return bytes;
}

bool RegionRegistry::WithinShareLocked(const Client& client, int64_t bytes) const {
  const int tenant = TenantOf(client.tenant);
  return bytes <= ShareOf(tenant) - tenant_bytes_[tenant].held() - ClaimedLocked(client, tenant);
}

std::vector<RegionRef> RegionRegistry::DisplaceLocked(const Client& client, int64_t bytes) {
  std::vector<RegionRef> displaced;
  const int64_t wanted = bytes + ClaimedLocked(client, std::nullopt);
  // What comes only once a request ends is not waited for while others have idle memory beyond
  // their shares.
  const auto enough = [&](bool used) ATTEND_REQUIRES(mutex_) {
    return wanted <= limits_.bytes_max - bytes_.lasting() - (used ? 0 : late_bytes_);
  };
  if (enough(false)) return displaced;
  const auto beyond_share = [&](const SharedRegion& region) ATTEND_REQUIRES(mutex_) {
    const int owner = TenantOf(region.tenant);
    return region.device == SharedRegion::kHost && region.room == SharedRegion::Room::kTenants &&
           tenant_bytes_[owner].lasting() > ShareOf(owner);
  };
  // What is in use goes last, and what nobody can name any more goes before what is open.
  std::map<std::tuple<bool, bool, uint64_t, std::string>, SharedRegion*> candidates;
  const auto consider = [&](SharedRegion* region, bool used) ATTEND_REQUIRES(mutex_) {
    if (!beyond_share(*region)) return;
    candidates.emplace(std::tuple(used, !region->kept, region->last_use, region->token), region);
  };
  for (const auto& [token, region] : regions_) consider(region.get(), region.use_count() > 1);
  for (const auto& [number, each] : clients_) {
    for (const auto& [token, region] : each.kept) consider(region, !region->reaped);
  }
  for (const auto& [order, region] : candidates) {
    const bool used = std::get<0>(order);
    if (enough(used)) break;
    if (!beyond_share(*region)) continue;
    ++stats_.displaced;
    if (used) late_bytes_ += region->bytes;
    region->late = used;
    if (!region->kept) displaced.push_back(KeepLocked(regions_.find(region->token)));
    SetRoomLocked(*region,
                  region->unlocked ? SharedRegion::Room::kOthers : SharedRegion::Room::kComing);
  }
  return displaced;
}

TimePoint RegionRegistry::WaitLocked(Client& client, int64_t bytes, bool displacing) {
  const TimePoint now = clock_.Now();
  if (client.waits_since == TimePoint()) client.waits_since = now;
  // A client may take again what it has just released. The time counts from the start of the
  // reaping: a device that hangs costs a client this time once, not once for each region. But
  // others may have a region reaped at any time.
  TimePoint until =
      reaping_ ? std::min(reaping_since_, client.waits_since) + limits_.return_wait : TimePoint();
  // What it lacks, another has beyond its share: displaced now, or released and still in use.
  if (displacing && bytes_.held() > stats_.bytes) {
    if (client.claimed_bytes == 0) client.claimed_until = now + limits_.return_wait;
    client.claimed_bytes = bytes;
    until = std::max(until, client.claimed_until);
  }
  return now < until ? until : TimePoint();
}

void RegionRegistry::EndWaitLocked(Client& client) {
  client.waits_since = TimePoint();
  client.claimed_bytes = 0;
}

Status RegionRegistry::Reserve(uint64_t client, int64_t bytes, TenantHold& hold, TimePoint* until) {
  std::vector<RegionRef> displaced;  // let go of outside the lock
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || found->second.ended) return Internal("the client has gone");
  Client& owner = found->second;
  const bool counts = limits_.tenants != nullptr && bytes > 0;
  const int tenant = TenantOf(owner.tenant);
  Status status = counts ? limits_.tenants->Spend(tenant, 0) : Status();
  if (!status.ok()) {  // before anybody makes room for it
    EndWaitLocked(owner);
    return status;
  }
  status = CheckLocked(owner, bytes);
  const bool limit_fits = !counts || limits_.tenants->Fits(tenant, Limit::kSharedMemory, bytes);
  if (!status.ok() || !limit_fits) {
    const bool displacing =
        limit_fits && CheckClientLocked(owner, bytes).ok() && WithinShareLocked(owner, bytes);
    if (displacing) {
      displaced = DisplaceLocked(owner, bytes);
      status = CheckLocked(owner, bytes);  // what nobody here used has made room at once
    }
    if (!status.ok() || !limit_fits) {
      if (until != nullptr) *until = WaitLocked(owner, bytes, displacing);
      if (until != nullptr && *until != TimePoint()) return Full(bytes, "room is being made");
    }
  }
  if (status.ok() && counts) {
    status = limits_.tenants->Take(tenant, Limit::kSharedMemory, hold.bytes, bytes);
    if (status.ok()) status = limits_.tenants->Spend(tenant, bytes);
  }
  EndWaitLocked(owner);
  if (!status.ok()) return status;
  owner.bytes += bytes;
  ++owner.regions;
  if (bytes == 0) ++owner.lent;
  owner.last_use = ++uses_;
  bytes_.taken += bytes;
  tenant_bytes_[tenant].taken += bytes;
  hold.tenant = owner.tenant;
  assert(bytes_.held() <= limits_.bytes_max && owner.bytes <= limits_.client_bytes_max);
  return status;
}

}  // namespace attend
