// SPDX-License-Identifier: Apache-2.0
//
// The audit of all sessions. It recomputes every count and charge from the sessions and from the
// holds, forks and truncations in progress. So a page that leaks, or that is freed while still in
// use, is detected in the operation that causes it.

#include <algorithm>
#include <map>
#include <new>
#include <vector>

#include "server/sessions/session_table.h"

namespace attend {

bool SessionTable::Consistent() const {
  const MutexLock lock(mutex_);
  return ConsistentLocked();
}

bool SessionTable::ConsistentLocked() const {
  try {
    return PagesAddUp() && SessionsAddUp() && UsesAddUp();
  } catch (const std::bad_alloc&) {
    return true;  // not enough memory to tell
  }
}

// Pages taken by holds and cuts are in no branch yet.
bool SessionTable::PagesAddUp() const {
  const size_t tenants = options_.tenant_weights.size();
  std::vector<std::vector<std::vector<PageNumber>>> taken(
      devices_.size(), std::vector<std::vector<PageNumber>>(tenants));
  std::vector<int64_t> pins(devices_.size());
  for (const HeldCaches* const hold : holds_) {
    pins[hold->device] += std::ssize(hold->leaves);
    for (size_t n = 0; n < hold->own.size(); ++n) {
      std::vector<PageNumber>& own = taken[hold->device][hold->sessions[n]->tenant];
      own.insert(own.end(), hold->OwnPages(n).begin(), hold->OwnPages(n).end());
    }
  }
  for (const Cut* const cut : cuts_) {
    ++pins[cut->origin->device];
    for (const CutLayer& layer : cut->layers) {
      std::vector<PageNumber>& own = taken[cut->origin->device][cut->origin->tenant];
      own.insert(own.end(), layer.to.begin(), layer.to.end());
    }
  }
  for (size_t device = 0; device < devices_.size(); ++device) {
    if (!devices_[device].pages->Consistent(taken[device], pins[device])) return false;
  }
  return true;
}

// Whether the session's pages are contiguous up to its leaf. There may be gaps if some were evicted
// and the session has not been settled yet.
bool SessionTable::EndsAsItsLeaf(const Session& session) const {
  const PageTree::Branch* branch = session.leaf;
  const bool kept = session.pinned || session.in_use > 0;
  if (!branch->leaf || branch->kept != kept || branch->tenant != session.tenant) return false;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const int64_t length = session.layers[n].length;
    const int64_t pages = (length + options_.page_rows - 1) / options_.page_rows;
    if (pages < PageTree::PagesOf(*branch, n)) return false;
  }
  bool evicted = branch->bytes == 0;
  for (; branch->parent->parent != nullptr; branch = branch->parent) {
    const PageTree::Branch& before = *branch->parent;
    const auto all = std::ssize(before.pages[0]);
    for (const auto& pages : before.pages) {
      if (std::ssize(pages) != all) return false;
    }
    if (evicted ? before.begin + all > branch->begin : before.begin + all != branch->begin) {
      return false;
    }
    evicted &= before.bytes == 0;
  }
  return branch->begin == 0 || evicted;
}

bool SessionTable::SessionsAddUp() const {
  std::vector<int64_t> sessions(options_.tenant_weights.size()), bytes(sessions.size());
  for (const auto& [id, session] : sessions_) {
    if (!by_tenant_.contains({session->tenant, session->id})) return false;
    if (!EndsAsItsLeaf(*session)) return false;
    ++sessions[session->tenant];
    bytes[session->tenant] += FixedBytes(std::ssize(session->layers));
  }
  for (size_t n = 0; n < sessions.size(); ++n) {
    const auto tenant = static_cast<int>(n);
    if (places_.held(tenant) != sessions[n] || tables_.held(tenant) < bytes[n]) return false;
  }
  return leases_.Consistent() && leases_.count() == std::ssize(sessions_) &&
         by_tenant_.size() == sessions_.size();
}

bool SessionTable::UsesAddUp() const {
  std::map<const Session*, int64_t> uses;
  std::map<const Layer*, int64_t> changes;
  const auto add = [&](const Session& session) {
    uses[&session];
    for (const Layer& layer : session.layers) changes[&layer];
  };
  for (const auto& [id, session] : sessions_) add(*session);
  for (const HeldCaches* const hold : holds_) {
    const bool changing = !hold->own.empty() && !hold->committed && hold->append_rows > 0;
    for (size_t n = 0; n < hold->sessions.size(); ++n) {
      const Session& session = *hold->sessions[n];
      add(session);
      ++uses[&session];
      changes[&session.layers[hold->uses[n].layer]] += changing ? 1 : 0;
    }
  }
  for (const Cut* const cut : cuts_) {
    if (cut->fork != nullptr) continue;
    add(*cut->origin);
    ++uses[cut->origin.get()];
    for (const Layer& layer : cut->origin->layers) ++changes[&layer];
  }
  return std::all_of(uses.begin(), uses.end(),
                     [](const auto& use) { return use.first->in_use == use.second; }) &&
         std::all_of(changes.begin(), changes.end(), [](const auto& change) {
           return (change.first->changing ? 1 : 0) == change.second;
         });
}

}  // namespace attend
