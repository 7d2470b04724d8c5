// SPDX-License-Identifier: Apache-2.0
//
// What of the memory tenants may have, and lose to others.

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "server/util/weight_share.h"

namespace attend {

int64_t SessionTable::ShareOf(int tenant, int64_t all) const {
  return attend::ShareOf(options_.tenant_weights, tenant, all);
}

// The bytes of pages in use that the tenant has beyond its share; negative: it has fewer.
int64_t SessionTable::BeyondShare(int device, int tenant) const {
  const Pool& pool = pools_[device];
  return pool.tenant_bytes[tenant] - ShareOf(tenant, pool.pages->stats().total_bytes);
}

bool SessionTable::WithinShare(const Need& need) const {
  return BeyondShare(need.session.device, need.session.tenant) + need.bytes <= 0;
}

// Pinned memory cannot be evicted, so a tenant may pin no more than its share. What its sessions
// share counts for each, and so do the pages that appends, forks and truncations under way have
// taken. A tenant that has no more than its share in all need not be asked.
Status SessionTable::CheckPinned(const Session& session, int64_t bytes) const {
  if (bytes == 0) return Status();
  if (BeyondShare(session.device, session.tenant) + bytes <= 0) return Status();
  int64_t pinned = bytes;
  const auto counts = [&session](const Session& each) {
    return each.pinned && each.tenant == session.tenant && each.device == session.device;
  };
  for (auto [at, end] = Of(session.tenant); at != end; ++at) {
    const Session* const each = at->second;
    if (counts(*each)) pinned += each->page_bytes;
  }
  for (const CacheHold* const hold : holds_) {
    for (size_t n = 0; n < hold->reserved_.size(); ++n) {
      if (!counts(*hold->sessions_[n])) continue;
      pinned += std::ssize(hold->OwnPages(n)) * hold->layout_.page_bytes;
    }
  }
  for (const Cut* const cut : cuts_) {
    const Session& owner = cut->fork == nullptr ? *cut->origin : *cut->fork;
    if (!counts(owner)) continue;
    for (const CutPage& page : cut->pages) {
      pinned += owner.layers[page.layer].layout.page_bytes;
    }
  }
  const int64_t share = ShareOf(session.tenant, pools_[session.device].pages->stats().total_bytes);
  if (pinned <= share) return Status();
  return ResourceExhausted("the tenant's pinned sessions would have " + std::to_string(pinned) +
                           " bytes, may have at most " + std::to_string(share) +
                           ", its share of the memory (session-memory)");
}

Status SessionTable::KeepLimit(const Need& need, CacheRefusal* refusal) {
  if (options_.limits == nullptr) return Status();
  const int tenant = need.session.tenant;
  const int64_t most = options_.limits->most(tenant, Limit::kSessionMemory);
  const int64_t& held = pools_[need.session.device].tenant_bytes[tenant];
  const auto missing = [&] { return held + need.bytes - most; };
  if (missing() <= 0) return Status();
  int64_t own = 0;  // that may go; an upper bound, as in EnoughToEvict
  for (auto [at, end] = Of(tenant); at != end; ++at) {
    const Session* const each = at->second;
    if (MayLose(*each, need, From::kOwn)) own += each->page_bytes;
  }
  if (held - std::min(own, held) + need.bytes <= most) Evict(need, From::kOwn, missing);
  if (missing() <= 0) return Status();
  if (refusal != nullptr) {
    refusal->missing_bytes = missing();
    refusal->tenant_limit = true;
  }
  options_.limits->CountRefusal(tenant, Limit::kSessionMemory);
  return ResourceExhausted("tenant limit session-memory: the tenant's sessions would have " +
                           std::to_string(held + need.bytes) +
                           " bytes on a device, may have at most " + std::to_string(most));
}

void SessionTable::Claim(const Need& need) {
  TenantClaim& claim = pools_[need.session.device].claims[need.session.tenant];
  const TimePoint now = clock_.Now();
  claim.bytes = std::max(claim.until <= now ? 0 : claim.bytes, need.bytes);
  claim.until = now + options_.claim_time;
}

int64_t SessionTable::ClaimsOfOthers(const Need& need) const {
  const Pool& pool = pools_[need.session.device];
  int64_t bytes = 0;
  for (size_t tenant = 0; tenant < pool.claims.size(); ++tenant) {
    const TenantClaim& claim = pool.claims[tenant];
    const auto each = static_cast<int>(tenant);
    if (each == need.session.tenant || claim.bytes == 0 || claim.until <= clock_.Now()) continue;
    bytes += std::clamp<int64_t>(-BeyondShare(need.session.device, each), 0, claim.bytes);
  }
  return bytes;
}

// Who is within its share lets nobody wait for what it has.
int64_t SessionTable::ComingBytes(int device) const {
  const std::vector<int64_t>& coming = pools_[device].tenant_coming;
  int64_t bytes = 0;
  for (size_t tenant = 0; tenant < coming.size(); ++tenant) {
    if (coming[tenant] == 0) continue;
    bytes += std::clamp<int64_t>(BeyondShare(device, static_cast<int>(tenant)), 0, coming[tenant]);
  }
  return bytes;
}

int64_t SessionTable::MayLoseBytes(int tenant, const Need& need) const {
  if (tenant == need.session.tenant) return std::numeric_limits<int64_t>::max();
  const int device = need.session.device;
  const int64_t coming = pools_[device].tenant_coming[tenant];
  return std::max<int64_t>(0, BeyondShare(device, tenant) - coming);
}

}  // namespace attend
