// SPDX-License-Identifier: Apache-2.0
//
// Eviction from a tree of pages, and the audit of its invariants.
//
// MakeRoom repeatedly takes the idle branch that was used longest ago, of the needy tenant or of
// one beyond its own part, and frees its pages from the end, the same number of rows in all layers,
// until enough is free. A branch of another tenant stops losing pages when its tenant is within its
// part. Only branches without successors are idle, so a sequence always loses its tail first and
// what is left is a prefix. Nothing is evicted if even the upper bound (MayMakeRoom) is too small.

#include <algorithm>
#include <cassert>
#include <chrono>

#include "server/sessions/page_tree.h"

namespace attend {

void EvictionStats::Add(const EvictionStats& other) {
  evictions_own += other.evictions_own;
  evictions_others += other.evictions_others;
  evicted_bytes += other.evicted_bytes;
  evicted_idle_seconds += other.evicted_idle_seconds;
  for (size_t n = 0; n < evictions_by_idle.size(); ++n) {
    evictions_by_idle[n] += other.evictions_by_idle[n];
  }
}

int64_t PageTree::Missing(int tenant, int64_t page_bytes, int64_t count) const {
  const int64_t charge = Charge(page_bytes);
  return std::max(count * charge - ledger_.Room(tenant), (count - pool_.Room(page_bytes)) * charge);
}

bool PageTree::MayMakeRoom(int tenant, int64_t bytes) const {
  int64_t most = ledger_.Room(tenant) + idle_bytes_[tenant];
  for (int each = 0; each < ledger_.tenants(); ++each) {
    if (each != tenant) most += std::min(idle_bytes_[each], ledger_.Beyond(each));
  }
  return bytes <= most;
}

bool PageTree::MakeRoom(int tenant, int64_t page_bytes, int64_t count, TimePoint now) {
  const auto missing = [&] { return Missing(tenant, page_bytes, count); };
  const bool enough = MayMakeRoom(tenant, count * Charge(page_bytes));
  while (missing() > 0) {
    Branch* const oldest = enough ? Oldest(tenant, true) : nullptr;
    if (oldest == nullptr) return false;
    Evict(*oldest, tenant, missing, now);
  }
  return true;
}

bool PageTree::EvictOwn(int tenant, int64_t bytes, TimePoint now) {
  if (bytes > idle_bytes_[tenant]) return false;
  const int64_t most = ledger_.held(tenant) - bytes;
  const auto missing = [&] { return ledger_.held(tenant) - most; };
  while (missing() > 0) {
    Branch* const oldest = Oldest(tenant, false);
    if (oldest == nullptr) return false;
    Evict(*oldest, tenant, missing, now);
  }
  return true;
}

PageTree::Branch* PageTree::Oldest(int tenant, bool others) const {
  Branch* oldest = nullptr;
  for (int each = 0; each < ledger_.tenants(); ++each) {
    if (idle_[each].empty() || (each != tenant && !others)) continue;
    Branch* const branch = idle_[each].begin()->second;
    if (each != tenant && LastPagesBytes(*branch) > ledger_.Beyond(each)) continue;
    if (oldest == nullptr || branch->last_used < oldest->last_used) oldest = branch;
  }
  return oldest;
}

int64_t PageTree::LastPagesBytes(const Branch& branch) {
  size_t longest = 0;
  int64_t bytes = 0;
  for (size_t n = 0; n < branch.pages.size(); ++n) {
    if (branch.pages[n].size() > longest) bytes = 0;
    longest = std::max(longest, branch.pages[n].size());
    if (branch.pages[n].size() == longest) bytes += (*branch.page_bytes)[n];
  }
  return bytes;
}

void PageTree::Evict(Branch& branch, int tenant, const std::function<int64_t()>& missing,
                     TimePoint now) {
  const int64_t before = branch.bytes;
  while (branch.bytes > 0 && missing() > 0) {
    if (branch.tenant != tenant && LastPagesBytes(branch) > ledger_.Beyond(branch.tenant)) break;
    size_t longest = 0;
    for (const auto& pages : branch.pages) longest = std::max(longest, pages.size());
    for (size_t n = 0; n < branch.pages.size(); ++n) {
      std::vector<PageNumber>& pages = branch.pages[n];
      if (pages.size() < longest) continue;
      Give(branch.tenant, {&pages.back(), 1});
      pages.pop_back();
      branch.bytes -= (*branch.page_bytes)[n];
    }
  }
  const double idle = std::chrono::duration<double>(now - branch.last_used).count();
  ++(branch.tenant == tenant ? evictions_.evictions_own : evictions_.evictions_others);
  evictions_.evicted_bytes += before - branch.bytes;
  evictions_.evicted_idle_seconds += idle;
  const auto& bounds = EvictionStats::kIdleBoundsSeconds;
  const auto* const bound = std::lower_bound(bounds.begin(), bounds.end(), idle);
  ++evictions_.evictions_by_idle[bound - bounds.begin()];
  for (size_t n = 0; n < branch.pages.size(); ++n) Fit(branch, n);
  Update(branch);
}

// Whether the cached fields of a branch agree with the branch and its children.
bool PageTree::Consistent(const Branch& branch) const {
  int64_t children = 0, blockers = 0, stayers = 0, bytes = 0;
  const Branch* previous = nullptr;
  for (const Branch* child = branch.first_child; child != nullptr; child = child->next) {
    if (child->parent != &branch || child->previous != previous) return false;
    if (child->tenant != branch.tenant && &branch != &root_) return false;
    previous = child;
    ++children;
    blockers += child->blocks ? 1 : 0;
    stayers += child->stays ? 1 : 0;
  }
  if (children != branch.children || blockers != branch.blockers || stayers != branch.stayers) {
    return false;
  }
  if (&branch == &root_) return true;
  for (size_t n = 0; n < branch.pages.size(); ++n) {
    bytes += std::ssize(branch.pages[n]) * (*branch.page_bytes)[n];
  }
  const bool stays = branch.pins > 0 || branch.kept || stayers > 0;
  const bool idle = !stays && bytes > 0 && blockers == 0;
  const auto& order = idle_[branch.tenant];
  return bytes == branch.bytes && stays == branch.stays &&
         branch.blocks == (stays || bytes > 0 || blockers > 0) &&
         idle == order.contains({branch.last_used, &const_cast<Branch&>(branch)}) &&
         idle == branch.entry.empty() && (branch.leaf || branch.pins > 0 || children > 0);
}

bool PageTree::Consistent(const std::vector<std::vector<PageNumber>>& taken, int64_t pins) const {
  std::vector<PageNumber> all;
  std::vector<int64_t> held(idle_.size()), idle_bytes(idle_.size());
  size_t idle = 0, filed = 0;
  int64_t shared_bytes = 0;
  for (size_t tenant = 0; tenant < taken.size(); ++tenant) {
    all.insert(all.end(), taken[tenant].begin(), taken[tenant].end());
    for (const PageNumber page : taken[tenant]) held[tenant] += Charge(pool_.page_bytes(page));
    idle += idle_[tenant].size();
  }
  std::vector<const Branch*> left = {&root_};
  while (!left.empty()) {
    const Branch& branch = *left.back();
    left.pop_back();
    if (!Consistent(branch)) return false;
    for (const Branch* child = branch.first_child; child != nullptr; child = child->next) {
      left.push_back(child);
    }
    if (&branch == &root_) continue;
    for (const auto& pages : branch.pages) all.insert(all.end(), pages.begin(), pages.end());
    held[branch.tenant] += branch.bytes;
    idle_bytes[branch.tenant] += branch.stays ? 0 : branch.bytes;
    shared_bytes += !branch.leaf && branch.children > 1 ? branch.bytes : 0;
    filed += branch.entry.empty() ? 1 : 0;
    pins -= branch.pins;
  }
  for (size_t tenant = 0; tenant < held.size(); ++tenant) {
    if (held[tenant] != ledger_.held(static_cast<int>(tenant))) return false;
  }
  return pins == 0 && idle == filed && idle_bytes == idle_bytes_ && shared_bytes == shared_bytes_ &&
         pool_.Consistent(std::move(all));
}

}  // namespace attend
