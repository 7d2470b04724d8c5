// SPDX-License-Identifier: Apache-2.0
//
// What is always true of all sessions. It is found out from what each of them, and each hold, fork
// and truncation under way, really has, so that a page that is lost, or let go by somebody who
// still has it, is seen with the operation that does it.

#include <algorithm>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "server/sessions/session_table.h"

namespace attend {

bool SessionTable::Consistent() const {
  const MutexLock lock(mutex_);
  return ConsistentLocked();
}

bool SessionTable::ConsistentLocked() const {
  try {
    return PagesAddUp() && SharedAlike() && SessionsAddUp() && UsesAddUp();
  } catch (const std::bad_alloc&) {
    return true;  // nothing was found out
  }
}

std::set<const Session*> SessionTable::AllInUse() const {
  std::set<const Session*> all;
  for (const auto& [id, session] : sessions_) all.insert(session.get());
  for (const CacheHold* const hold : holds_) {
    for (const SessionRef& session : hold->sessions_) all.insert(session.get());
  }
  for (const Cut* const cut : cuts_) {
    if (cut->fork == nullptr) all.insert(cut->origin.get());
  }
  return all;
}

bool SessionTable::PagesAddUp() const {
  // By device and tenant, once for each reference.
  std::vector<std::vector<std::vector<PageNumber>>> held(
      pools_.size(), std::vector<std::vector<PageNumber>>(tenants_.size()));
  const auto add = [&held](const Session& session, std::span<const PageNumber> pages) {
    std::vector<PageNumber>& all = held[session.device][session.tenant];
    all.insert(all.end(), pages.begin(), pages.end());
  };
  for (const Session* const session : AllInUse()) {
    for (const Layer& layer : session->layers) {
      add(*session, layer.pages);
      for (const Readers& readers : layer.readers) add(*session, readers.cut);
    }
  }
  for (const CacheHold* const hold : holds_) {
    for (size_t n = 0; n < hold->reserved_.size(); ++n) {
      add(*hold->sessions_[n], hold->OwnPages(n));
    }
  }
  for (const Cut* const cut : cuts_) {
    for (const CutPage& page : cut->pages) {
      add(*cut->origin, {cut->fork == nullptr ? &page.to : &page.from, 1});
    }
    if (cut->fork == nullptr) continue;
    for (const Layer& layer : cut->fork->layers) add(*cut->fork, layer.pages);
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const PagePool& pool = *pools_[device].pages;
    std::vector<PageNumber> all;
    for (size_t tenant = 0; tenant < held[device].size(); ++tenant) {
      std::vector<PageNumber>& pages = held[device][tenant];
      all.insert(all.end(), pages.begin(), pages.end());
      std::sort(pages.begin(), pages.end());
      pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
      int64_t bytes = 0;
      for (const PageNumber page : pages) bytes += pool.page_bytes(page);
      if (bytes != pools_[device].tenant_bytes[tenant]) return false;
    }
    if (!pool.Consistent(std::move(all))) return false;
  }
  return true;
}

// All layers of a session are forked and cut alike: those that share a page share that of each
// layer which is as long (WhoShare in eviction.cc).
bool SessionTable::SharedAlike() const {
  std::map<std::pair<size_t, PageNumber>, PageNumber> firsts;
  for (const auto& [id, session] : sessions_) {
    const std::vector<PageNumber>& first = session->layers[0].pages;
    for (size_t n = 1; n < session->layers.size(); ++n) {
      const std::vector<PageNumber>& pages = session->layers[n].pages;
      const auto device = static_cast<size_t>(session->device);
      for (size_t i = 0; i < pages.size(); ++i) {
        const PageNumber with = i < first.size() ? first[i] : 0;
        // Of one layer's page the first layer's, and the other way round.
        const size_t key = 2 * (device * static_cast<size_t>(options_.layers_max) + n);
        if (firsts.emplace(std::pair(key, pages[i]), with).first->second != with) return false;
        if (with == 0) continue;
        if (firsts.emplace(std::pair(key + 1, with), pages[i]).first->second != pages[i])
          return false;
      }
    }
  }
  return true;
}

bool SessionTable::SessionsAddUp() const {
  TableUse table;
  std::vector<TenantTable> tenants(tenants_.size());
  const auto add = [&](const Session& session, int64_t sessions, int64_t bytes) {
    for (const Layer& layer : session.layers) bytes += layer.counted_bytes;
    TenantTable& tenant = tenants[session.tenant];
    for (TableUse* const each : {&table, &tenant.all, session.pinned ? &tenant.pinned : nullptr}) {
      if (each == nullptr) continue;
      each->sessions += sessions;
      each->bytes += bytes;
    }
  };
  for (const auto& [id, session] : sessions_) {
    if (!by_use_.contains({session->last_used, session.get()})) return false;
    if (!by_lease_end_.contains({session->last_used + session->lease, session.get()})) return false;
    for (const Layer& layer : session->layers) {
      const int64_t pages = (layer.length + options_.page_rows - 1) / options_.page_rows;
      if (std::ssize(layer.pages) != pages) return false;
      // Whoever shares a page shares all before it.
      const PagePool& pool = *pools_[session->device].pages;
      const auto shared = [&pool](PageNumber page) { return pool.references(page) > 1; };
      if (!std::is_partitioned(layer.pages.begin(), layer.pages.end(), shared)) return false;
    }
  }
  for (const Session* const session : AllInUse()) {
    const auto found = sessions_.find(session->id);
    const bool there = found != sessions_.end() && found->second.get() == session;
    add(*session, there ? 1 : 0, there ? FixedBytes(std::ssize(session->layers)) : 0);
    for (const Layer& layer : session->layers) {
      if (layer.counted_bytes != layer.list_bytes()) return false;
    }
  }
  for (const Cut* const cut : cuts_) {
    if (cut->fork != nullptr) add(*cut->fork, 0, 0);
  }
  return tenants == tenants_ && table == table_ && by_use_.size() == sessions_.size() &&
         by_lease_end_.size() == sessions_.size();
}

bool SessionTable::UsesAddUp() const {
  std::map<const Session*, int64_t> uses;
  std::map<const Layer*, int64_t> changes;
  std::map<const Readers*, int64_t> readers;
  for (const Session* const session : AllInUse()) {
    uses[session] = 0;
    for (const Layer& layer : session->layers) {
      changes[&layer] = 0;
      for (const Readers& each : layer.readers) readers[&each] = 0;
    }
  }
  for (const CacheHold* const hold : holds_) {
    const bool appends = !hold->reserved_.empty() && !hold->committed_ && hold->append_rows_ > 0;
    for (size_t n = 0; n < hold->sessions_.size(); ++n) {
      ++uses[hold->sessions_[n].get()];
      changes[&hold->sessions_[n]->layers[hold->uses_[n].layer]] += appends ? 1 : 0;
      if (!hold->reserved_.empty()) ++readers[&*hold->reserved_[n].readers];
    }
  }
  for (const Cut* const cut : cuts_) {
    if (cut->fork != nullptr) continue;
    ++uses[cut->origin.get()];
    for (const Layer& layer : cut->origin->layers) ++changes[&layer];
  }
  return std::all_of(uses.begin(), uses.end(),
                     [](const auto& use) { return use.first->in_use == use.second; }) &&
         std::all_of(readers.begin(), readers.end(),
                     [](const auto& each) { return each.first->count == each.second; }) &&
         std::all_of(changes.begin(), changes.end(), [](const auto& change) {
           return (change.first->changing ? 1 : 0) == change.second;
         });
}

}  // namespace attend
