// SPDX-License-Identifier: Apache-2.0
//
// What is always true of all sessions. It is found out from what each of them, and each hold, fork
// and truncation under way, really has, so that a page that is lost, or let go by somebody who
// still has it, is seen with the operation that does it.

#include <algorithm>
#include <map>
#include <new>
#include <span>
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

// The references to pages, by device and tenant, and those of them that are leaving.
struct SessionTable::References {
  std::vector<PageNumber> held;
  std::vector<PageNumber> leaving;

  void Add(std::span<const PageNumber> pages, bool leave) {
    held.insert(held.end(), pages.begin(), pages.end());
    if (leave) leaving.insert(leaving.end(), pages.begin(), pages.end());
  }
};

bool SessionTable::PagesAddUp() const {
  std::vector<std::vector<References>> all(pools_.size(), std::vector<References>(tenants_.size()));
  const auto of = [&all](const Session& session) -> References& {
    return all[session.device][session.tenant];
  };
  for (const Session* const session : AllInUse()) {
    for (const Layer& layer : session->layers) {
      of(*session).Add(layer.pages, layer.leaving);
      for (const Readers& readers : layer.readers) of(*session).Add(readers.cut, true);
    }
  }
  for (const CacheHold* const hold : holds_) {
    for (size_t n = 0; n < hold->reserved_.size(); ++n) {
      of(*hold->sessions_[n]).Add(hold->OwnPages(n), hold->reserved_[n].doomed);
    }
  }
  for (const Cut* const cut : cuts_) {
    for (const CutPage& page : cut->pages) {
      of(*cut->origin).Add({cut->fork == nullptr ? &page.to : &page.from, 1}, false);
    }
    if (cut->fork == nullptr) continue;
    for (const Layer& layer : cut->fork->layers) of(*cut->fork).Add(layer.pages, false);
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const PagePool& pool = *pools_[device].pages;
    References whole;
    for (size_t tenant = 0; tenant < all[device].size(); ++tenant) {
      std::vector<PageNumber>& held = all[device][tenant].held;
      std::vector<PageNumber>& leaving = all[device][tenant].leaving;
      whole.held.insert(whole.held.end(), held.begin(), held.end());
      whole.leaving.insert(whole.leaving.end(), leaving.begin(), leaving.end());
      std::map<PageNumber, int64_t> kept;  // references that are not leaving
      for (const PageNumber page : held) ++kept[page];
      for (const PageNumber page : leaving) --kept[page];
      int64_t bytes = 0, coming = 0;
      for (const auto& [page, references] : kept) {
        bytes += pool.page_bytes(page);
        coming += references == 0 ? pool.page_bytes(page) : 0;
      }
      if (bytes != pools_[device].tenant_bytes[tenant]) return false;
      if (coming != pools_[device].tenant_coming[tenant]) return false;
    }
    if (!pool.Consistent(std::move(whole.held), std::move(whole.leaving))) return false;
  }
  return true;
}

// Sessions that share a page share that of the first layer at the same place (WhoShare in
// eviction.cc).
bool SessionTable::SharedAlike() const {
  std::map<std::pair<int, PageNumber>, PageNumber> firsts;
  for (const auto& [id, session] : sessions_) {
    const std::vector<PageNumber>& first = session->layers[0].pages;
    for (size_t n = 1; n < session->layers.size(); ++n) {
      const std::vector<PageNumber>& pages = session->layers[n].pages;
      for (size_t i = 0; i < pages.size(); ++i) {
        const PageNumber with = i < first.size() ? first[i] : 0;
        const auto [found, fresh] = firsts.emplace(std::pair(session->device, pages[i]), with);
        if (!fresh && (with == 0 || found->second != with)) return false;
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
    if (!by_lease_end_.contains({session->look_again, session.get()})) return false;
    if (!by_tenant_.contains({session->tenant, session->id})) return false;
    if (session->look_again < session->last_used + session->lease) return false;
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
    int64_t pages_bytes = 0;
    for (const Layer& layer : session->layers) {
      if (layer.counted_bytes != layer.list_bytes()) return false;
      pages_bytes += std::ssize(layer.pages) * layer.layout.page_bytes;
    }
    if (session->page_bytes != pages_bytes) return false;
  }
  for (const Cut* const cut : cuts_) {
    if (cut->fork != nullptr) add(*cut->fork, 0, 0);
  }
  return tenants == tenants_ && table == table_ && by_use_.size() == sessions_.size() &&
         by_lease_end_.size() == sessions_.size() && by_tenant_.size() == sessions_.size();
}

bool SessionTable::UsesAddUp() const {
  std::map<const Session*, int64_t> uses;
  std::map<const Layer*, int64_t> changes, appends;
  std::map<const Readers*, int64_t> readers;
  for (const Session* const session : AllInUse()) {
    uses[session] = 0;
    for (const Layer& layer : session->layers) {
      changes[&layer] = 0;
      appends[&layer] = layer.append.hold == nullptr ? 0 : 1;
      for (const Readers& each : layer.readers) readers[&each] = 0;
    }
  }
  for (const CacheHold* const hold : holds_) {
    const bool changing = !hold->reserved_.empty() && !hold->committed_ && hold->append_rows_ > 0;
    for (size_t n = 0; n < hold->sessions_.size(); ++n) {
      ++uses[hold->sessions_[n].get()];
      const Layer& layer = hold->sessions_[n]->layers[hold->uses_[n].layer];
      changes[&layer] += changing ? 1 : 0;
      if (changing && !hold->reserved_[n].doomed) --appends[&layer];
      if (layer.append.hold == hold && layer.append.n != n) return false;
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
         std::all_of(appends.begin(), appends.end(),
                     [](const auto& append) { return append.second == 0; }) &&
         std::all_of(readers.begin(), readers.end(),
                     [](const auto& each) { return each.first->count == each.second; }) &&
         std::all_of(changes.begin(), changes.end(), [](const auto& change) {
           return (change.first->changing ? 1 : 0) == change.second;
         });
}

}  // namespace attend
