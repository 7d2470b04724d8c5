// SPDX-License-Identifier: Apache-2.0
//
// Admission of new regions, and how long a client may wait for memory that is being closed.

#include <algorithm>
#include <cassert>
#include <string>

#include "server/regions/region_registry.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

Status Full(int64_t bytes, const std::string& why) {
  return ResourceExhausted("a region of " + std::to_string(bytes) + " bytes: " + why);
}

}  // namespace

Status RegionRegistry::CheckLocked(const Client& client, int64_t bytes) const {
  if (client.regions >= limits_.client_regions_max) {
    return ResourceExhausted(
        Rejection::kRegions,
        "the client has " + std::to_string(client.regions) + " regions, may have at most " +
            std::to_string(limits_.client_regions_max) + " (shared-memory-client-regions)");
  }
  if (bytes > limits_.client_bytes_max - client.bytes) {
    return Full(bytes, std::to_string(client.bytes) +
                           " bytes of the connection's limit (shared-memory-client-max), " +
                           std::to_string(limits_.client_bytes_max) + ", are in use");
  }
  const int tenant = TenantOf(client.tenant);
  if (bytes <= ledger_.Room(tenant)) return Status();
  // How much other tenants use is visible only in the metrics.
  return Full(bytes, "too little of the limit for all regions (shared-memory-max), " +
                         std::to_string(limits_.bytes_max) + ", is free; the tenant has " +
                         std::to_string(ledger_.held(tenant)) + ", its reserved share is " +
                         std::to_string(ledger_.own(tenant)));
}

// A client may want the bytes that it has just released. The wait counts from the start of the
// current closing, so a hanging device costs a client this time once, not once per region; and from
// the client's first attempt, because other clients may keep the registry closing regions.
TimePoint RegionRegistry::WaitLocked(Client& client) {
  const TimePoint now = clock_.Now();
  if (client.waits_since == TimePoint()) client.waits_since = now;
  if (!reaping_) return {};
  const TimePoint until = std::min(reaping_since_, client.waits_since) + limits_.return_wait;
  return now < until ? until : TimePoint();
}

Status RegionRegistry::Reserve(uint64_t client, int64_t bytes, TenantHold& hold, TimePoint* until) {
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end() || found->second.ended)
    return Internal("the client has disconnected");
  Client& owner = found->second;
  const bool counts = limits_.tenants != nullptr && bytes > 0;
  const int tenant = TenantOf(owner.tenant);
  if (bytes > ledger_.most(tenant)) {  // never, so the client must not retry
    return InvalidArgument("a region of " + std::to_string(bytes) + " bytes exceeds the " +
                           std::to_string(ledger_.most(tenant)) +
                           " bytes of shared-memory-max that the tenant may have");
  }
  Status status = counts ? limits_.tenants->Spend(tenant, 0) : Status();
  if (status.ok()) {
    status = CheckLocked(owner, bytes);
    const bool fits = !counts || limits_.tenants->Fits(tenant, Limit::kSharedMemory, bytes);
    if (until != nullptr && (!status.ok() || !fits)) *until = WaitLocked(owner);
    if (until != nullptr && *until != TimePoint())
      return Full(bytes, "released memory is still being closed");
  }
  owner.waits_since = TimePoint();
  if (status.ok() && counts) {
    status = limits_.tenants->Take(tenant, Limit::kSharedMemory, hold.bytes, bytes);
    if (status.ok()) status = limits_.tenants->Spend(tenant, bytes);
  }
  if (!status.ok()) return status;
  owner.bytes += bytes;
  ++owner.regions;
  if (bytes == 0) ++owner.lent;
  ledger_.Add(tenant, bytes);
  hold.tenant = owner.tenant;
  assert(owner.bytes <= limits_.client_bytes_max);
  return status;
}

}  // namespace attend
