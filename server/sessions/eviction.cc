// SPDX-License-Identifier: Apache-2.0
//
// How sessions come to pages and lose them.

#include <algorithm>
#include <cassert>
#include <chrono>
#include <limits>

#include "server/sessions/session_table.h"
#include "server/util/weight_share.h"

namespace attend {

void SessionTable::DropPages(const Session& session, const Layer& layer,
                             std::span<const PageNumber> pages) {
  Pool& pool = pools_[session.device];
  pool.tenant_bytes[session.tenant] -= pool.pages->DropReferences(pages) * layer.layout.page_bytes;
}

void SessionTable::Shorten(Session& session, Layer& layer, int64_t length,
                           std::vector<PageNumber>* cut) {
  const int64_t rows = options_.page_rows;
  const auto keep = static_cast<size_t>((length + rows - 1) / rows);
  const auto tail = std::span(layer.pages).subspan(keep);
  if (cut != nullptr) {
    cut->insert(cut->end(), tail.begin(), tail.end());
  } else {
    assert(layer.readers.empty());
    DropPages(session, layer, tail);
  }
  layer.pages.resize(keep);
  layer.length = length;
  FitList(session, layer);
}

Status SessionTable::TakePages(const Session& session, int64_t page_bytes, int64_t count,
                               std::vector<PageNumber>& pages, CacheRefusal* refusal) {
  Pool& pool = pools_[session.device];
  const auto enough = [&] { return pool.pages->Room(page_bytes) >= count; };
  // What the device cannot have room for evicts nobody, and is refused below.
  const auto possible = [&]() ATTEND_REQUIRES(mutex_) {
    return enough() || (count <= pool.pages->stats().total_bytes / page_bytes &&
                        EnoughToEvict(session, count * page_bytes));
  };
  if (!possible()) GiveWay(session, count * page_bytes, enough);
  if (possible()) {
    ATTEND_RETURN_IF_ERROR(KeepLimit(session, count * page_bytes, refusal));
    if (!enough()) Evict(session, From::kAll, enough);
    // What sessions share was counted for each of them, so that it may be too little.
    if (!enough()) GiveWay(session, count * page_bytes, enough);
    if (!enough()) Evict(session, From::kAll, enough);
  }
  const Status taken = pool.pages->Take(page_bytes, count, pages);
  if (!taken.ok()) {
    if (refusal != nullptr) {
      refusal->missing_bytes = (count - pool.pages->Room(page_bytes)) * page_bytes;
    }
    return taken;
  }
  pool.tenant_bytes[session.tenant] += count * page_bytes;
  return Status();
}

int64_t SessionTable::ShareOf(int tenant, int64_t all) const {
  return attend::ShareOf(options_.tenant_weights, tenant, all);
}

// The bytes of pages in use that the tenant has beyond its share; negative: it has fewer.
int64_t SessionTable::BeyondShare(int device, int tenant) const {
  const Pool& pool = pools_[device];
  return pool.tenant_bytes[tenant] - ShareOf(tenant, pool.pages->stats().total_bytes);
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
  for (const auto& [unused, each] : by_use_) {
    if (!counts(*each)) continue;
    for (const Layer& layer : each->layers) {
      pinned += std::ssize(layer.pages) * layer.layout.page_bytes;
    }
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

// A session that they read, and pages that they have taken, would be kept from others for as long
// as a client likes to take to send its bytes. Those requests may still find all that they need
// when their bytes have come.
void SessionTable::GiveWay(const Session& needy, int64_t bytes, const Enough& enough) {
  if (BeyondShare(needy.device, needy.tenant) + bytes > 0) return;
  for (auto next = holds_.begin(); next != holds_.end() && !enough();) {
    CacheHold& hold = **next++;
    if (!hold.provisional_ || hold.device_ != needy.device || hold.tenant_ == needy.tenant)
      continue;
    if (BeyondShare(hold.device_, hold.tenant_) <= 0) continue;
    LetGo(hold);
    ++stats_.gave_way;
  }
}

bool SessionTable::MayEvict(const Session& session, const Session& needy) const {
  if (session.device != needy.device || session.in_use > 0 || session.pinned) return false;
  return session.tenant == needy.tenant || BeyondShare(session.device, session.tenant) > 0;
}

// An upper bound: pages that sessions share are counted for each of them. Looks no further than it
// has to.
bool SessionTable::EnoughToEvict(const Session& needy, int64_t bytes) const {
  const PagePool::Stats& stats = pools_[needy.device].pages->stats();
  int64_t found = stats.total_bytes - stats.used_bytes;
  std::vector<int64_t> left(options_.tenant_weights.size(), std::numeric_limits<int64_t>::max());
  for (size_t tenant = 0; tenant < left.size(); ++tenant) {
    if (static_cast<int>(tenant) == needy.tenant) continue;
    left[tenant] = std::max<int64_t>(0, BeyondShare(needy.device, static_cast<int>(tenant)));
  }
  for (const auto& [unused, each] : by_use_) {
    if (found >= bytes) return true;
    if (!MayEvict(*each, needy)) continue;
    int64_t own = 0;
    for (const Layer& layer : each->layers) {
      own += std::ssize(layer.pages) * layer.layout.page_bytes;
    }
    own = std::min(own, left[each->tenant]);
    left[each->tenant] -= own;
    found += own;
  }
  return found >= bytes;
}

Status SessionTable::KeepLimit(const Session& session, int64_t bytes, CacheRefusal* refusal) {
  if (options_.limits == nullptr) return Status();
  const int64_t most = options_.limits->most(session.tenant, Limit::kSessionMemory);
  const int64_t& held = pools_[session.device].tenant_bytes[session.tenant];
  const auto enough = [&] { return held + bytes <= most; };
  if (enough()) return Status();
  int64_t own = 0;  // that may go; an upper bound, as in EnoughToEvict
  for (const auto& [unused, each] : by_use_) {
    if (each->tenant != session.tenant || !MayEvict(*each, session)) continue;
    for (const Layer& layer : each->layers) {
      own += std::ssize(layer.pages) * layer.layout.page_bytes;
    }
  }
  if (held - std::min(own, held) + bytes <= most) Evict(session, From::kOwn, enough);
  if (enough()) return Status();
  if (refusal != nullptr) {
    refusal->missing_bytes = held + bytes - most;
    refusal->tenant_limit = true;
  }
  options_.limits->CountRefusal(session.tenant, Limit::kSessionMemory);
  return ResourceExhausted("tenant limit session-memory: the tenant's sessions would have " +
                           std::to_string(held + bytes) + " bytes on a device, may have at most " +
                           std::to_string(most));
}

void SessionTable::Evict(const Session& needy, From from, const Enough& enough) {
  EvictTails(needy, from, enough, nullptr);
  if (enough()) return;
  // What is left is shared: a page goes if all sessions that refer to it may lose it.
  Holders holders;
  for (const auto& [unused, each] : by_use_) {
    if (!MayEvict(*each, needy)) continue;
    for (const Layer& layer : each->layers) {
      for (const PageNumber page : layer.pages) holders[page].push_back(each);
    }
  }
  EvictTails(needy, from, enough, &holders);
}

void SessionTable::EvictTails(const Session& needy, From from, const Enough& enough,
                              Holders* holders) {
  for (const auto& [unused, each] : by_use_) {
    if (enough()) return;
    if (from == From::kOwn && each->tenant != needy.tenant) continue;
    if (MayEvict(*each, needy)) EvictTail(*each, needy, enough, holders);
  }
}

// Pages go from the end, of all layers alike, until it is enough, nothing is left, what is left
// would free nothing, or the tenant would have less than its share. With `holders`, pages that
// several of them share go too, from all of them.
void SessionTable::EvictTail(Session& session, const Session& needy, const Enough& enough,
                             Holders* holders) {
  const PagePool& pool = *pools_[session.device].pages;
  const int64_t before = pool.stats().used_bytes;
  const int64_t rows = options_.page_rows;
  while (!enough()) {
    int64_t longest = 0;
    for (const Layer& layer : session.layers) longest = std::max(longest, layer.length);
    if (longest == 0) break;
    const int64_t left = (longest - 1) / rows * rows;
    std::set<Session*> losers = {&session};
    int64_t frees = 0;
    for (const Layer& layer : session.layers) {
      if (layer.length <= left) continue;
      const PageNumber page = layer.pages[left / rows];
      int64_t by_losers = 1;
      if (holders != nullptr) {
        const std::vector<Session*>& all = (*holders)[page];
        by_losers = std::ssize(all);
        losers.insert(all.begin(), all.end());
      }
      if (pool.references(page) <= by_losers) frees += layer.layout.page_bytes;
    }
    if (frees == 0) break;
    if (session.tenant != needy.tenant && BeyondShare(session.device, session.tenant) < frees)
      break;
    for (Session* const loser : losers) {
      for (Layer& layer : loser->layers) {
        if (layer.length <= left) continue;
        Shorten(*loser, layer, left);
        layer.evicted_from = left;
        layer.append_id.clear();
      }
    }
  }
  const int64_t freed = before - pool.stats().used_bytes;
  if (freed == 0) return;
  ++(session.tenant == needy.tenant ? stats_.evictions_own : stats_.evictions_others);
  stats_.evicted_bytes += freed;
  const double idle = std::chrono::duration<double>(clock_.Now() - session.last_used).count();
  stats_.evicted_idle_seconds += idle;
  const auto* const bound =
      std::lower_bound(kIdleBoundsSeconds.begin(), kIdleBoundsSeconds.end(), idle);
  ++stats_.evictions_by_idle[bound - kIdleBoundsSeconds.begin()];
}

}  // namespace attend
