// SPDX-License-Identifier: Apache-2.0
//
// The pages of one device's sessions: which session has them, and which are evicted when memory is
// short.
//
// Sessions forked from each other begin with the same pages. So pages are stored in the branches of
// a tree: a branch has the pages, of each layer, that follow those of its parent. Each session ends
// in a branch of its own, its leaf, and its pages are those on the path from the root to it. A fork
// splits a branch at the fork point; a branch with a single successor is joined to it again. So
// each page is in one branch, or was taken and is not in a branch yet. Pages are not
// reference-counted, and no call visits the sessions that share one.
//
//             [0, 2)                  common prefix: 2 pages of each layer
//            /      \                                                                      .
//       [2, 5)      [2, 3)            the leaf of a session of 3 pages
//       /    \                                                                             .
//  [5, 5)    [5, 9)                   two leaves: forks that have 5 pages in common
//
// The ledger limits the pages of each tenant. An idle branch may be evicted: one that no branch
// continues, no request reads, and that is not the leaf of a session that is pinned or in use. It
// must belong to the tenant that needs memory, or to a tenant that holds more than its own part, of
// which only the excess may go. A branch loses pages from its end, of all layers alike; the least
// recently used branch goes first. A common prefix counts as used when the last of its sessions
// was, and goes after everything that follows it. Sessions are not notified: their leaf is empty
// then, and Settle finds where they end now.
//
// A branch charges its tenant's tables nothing but its pages' entries. The fixed charge of a
// session covers its leaf and one inner branch, and there are never more, because every inner
// branch has at least two successors.
//
// Not thread-safe: guarded by the session table's lock. Unless noted, a call is O(log n) in the
// number of branches, and O(1) in pages apart from those it gives, takes or moves. Steps that may
// run out of memory come before anything is changed.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "server/memory/ledger.h"
#include "server/sessions/page_pool.h"
#include "server/util/weight_share.h"

namespace attend {

// An entry in a page list, whose capacity is at most twice its size.
inline constexpr int64_t kPageEntryBytes = 2 * sizeof(PageNumber);

struct EvictionStats {
  // Histogram bounds of the time since pages were last used when they were evicted.
  static constexpr std::array<double, 10> kIdleBoundsSeconds = {0.1, 1,   5,   10,   30,
                                                                60,  300, 900, 3600, 21600};
  int64_t evictions_own = 0;     // for the tenant's own needs
  int64_t evictions_others = 0;  // for other tenants, from what exceeded the tenant's part
  int64_t evicted_bytes = 0;
  double evicted_idle_seconds = 0;  // sum over evictions
  // Evictions per bucket (not cumulative), up to each of kIdleBoundsSeconds; the last is above all.
  std::array<int64_t, kIdleBoundsSeconds.size() + 1> evictions_by_idle = {};

  void Add(const EvictionStats& other);
};

class PageTree {
 public:
  struct Branch;
  using IdleOrder = std::set<std::pair<TimePoint, Branch*>>;
  // Public for reading only: the tree alone changes it.
  struct Branch {
    int tenant = 0;
    std::shared_ptr<const std::vector<int64_t>> page_bytes;  // by layer, as charged
    int64_t begin = 0;                           // number of pages of each layer before it
    std::vector<std::vector<PageNumber>> pages;  // by layer

    bool leaf = false;      // a session ends here
    bool kept = false;      // that session is pinned or in use
    int64_t pins = 0;       // requests, forks and truncations that read it
    int64_t bytes = 0;      // charge of its pages
    TimePoint last_used{};  // the last use of it or of a successor
    Branch* parent = nullptr;
    Branch* first_child = nullptr;
    Branch* next = nullptr;  // sibling
    Branch* previous = nullptr;
    int64_t children = 0;
    int64_t blockers = 0;                      // children that must go before it
    bool blocks = false;                       // counted in its parent's blockers
    int64_t stayers = 0;                       // children that must not be evicted
    bool stays = false;                        // counted in its parent's stayers
    int64_t idle_bytes = 0, shared_bytes = 0;  // as last added to the tree's sums
    IdleOrder::node_type entry = {};           // its node while it is not in IdleOrder
  };
  struct Stats : PagePool::Stats {
    int64_t shared_bytes = 0;  // pages that several sessions share, each counted once
  };

  // `lists` bounds the memory of all page lists. It and `memory` must outlive the tree.
  PageTree(HostSpan memory, int64_t slab_bytes,
           std::function<void(char* data, int64_t page_bytes)> on_free,
           const TenantWeights& weights, Ledger& lists);
  ~PageTree();
  PageTree(const PageTree&) = delete;
  PageTree& operator=(const PageTree&) = delete;

  // Takes pages, which belong to the caller until it appends them to a leaf or gives them back.
  // Requires that Missing() <= 0 for them, and room in the lists.
  void Take(int tenant, int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages);
  void Give(int tenant, std::span<const PageNumber> pages);
  // Bytes that must be freed before the tenant can take `count` pages; 0 or less: none.
  int64_t Missing(int tenant, int64_t page_bytes, int64_t count) const;
  // Whether `bytes` could be made available by evicting everything evictable. An upper bound,
  // because other tenants lose whole rows of pages, of all layers. O(tenants).
  bool MayMakeRoom(int tenant, int64_t bytes) const;
  // Evicts until Missing() <= 0; returns whether it succeeded. Evicts nothing if MayMakeRoom says
  // that it would not suffice. O(tenants) for each branch that loses pages, and O(layers) for each
  // page of it.
  bool MakeRoom(int tenant, int64_t page_bytes, int64_t count, TimePoint now);
  // Evicts `bytes` of the tenant's own.
  bool EvictOwn(int tenant, int64_t bytes, TimePoint now);

  // A leaf without pages for a new session; `page_bytes` are charges, by layer.
  Branch* Plant(int tenant, std::shared_ptr<const std::vector<int64_t>> page_bytes, bool kept,
                TimePoint now);
  // A leaf for a fork, which shares the first `pages` pages of each layer. All of these are full.
  Branch* Fork(Branch& leaf, int64_t pages, bool kept, TimePoint now);
  // Truncates each layer to kept[layer] pages. Pages that are being read stay with their readers.
  // Returns the session's new leaf, with capacity to append `room` pages to each layer.
  Branch* Cut(Branch& leaf, std::span<const int64_t> kept, int64_t room);
  // The session has ended.
  void Leave(Branch& leaf);
  // Updates an empty leaf to what eviction has left of its predecessors.
  void Settle(Branch& leaf);
  // Append moves taken pages into the leaf. After Reserve for as many, it allocates nothing.
  static void Reserve(Branch& leaf, size_t layer, int64_t more);
  void Append(Branch& leaf, size_t layer, std::span<const PageNumber> pages);
  // Shrinks a list that uses less than half of its capacity, if memory allows.
  static void Fit(Branch& leaf, size_t layer);
  // Sets whether the leaf's session is pinned or in use.
  void Keep(Branch& leaf, bool kept);
  // While a branch is pinned, its pages and all before it stay, even if the session ends.
  void Pin(Branch& branch);
  void Unpin(Branch& branch);
  void Touch(Branch& leaf, TimePoint now);

  // For a settled leaf: the number of pages of a layer, the page at an index, and all pages. The
  // latter two are O(depth).
  static int64_t PagesOf(const Branch& leaf, size_t layer) {
    return leaf.begin + std::ssize(leaf.pages[layer]);
  }
  static PageNumber PageAt(const Branch& leaf, size_t layer, int64_t index);
  static PageNumber* CopyPages(const Branch& leaf, size_t layer, PageNumber* to);
  // Whether its own pages, or pages it had before a cut, are being read.
  static bool IsRead(const Branch& leaf) { return leaf.pins > 0 || leaf.children > 0; }

  char* data(PageNumber page) const { return pool_.data(page); }
  const Ledger& ledger() const { return ledger_; }
  // Bytes charged for a page: its share of a slab.
  int64_t Charge(int64_t page_bytes) const { return pool_.Charge(page_bytes); }
  Stats stats() const { return {pool_.stats(), shared_bytes_}; }
  const EvictionStats& evictions() const { return evictions_; }
  // Whether all invariants above hold. `taken`, by tenant: pages that are in no branch; `pins`: the
  // total number of pins. Visits everything.
  bool Consistent(const std::vector<std::vector<PageNumber>>& taken, int64_t pins) const;

 private:
  static int64_t End(const Branch& branch) { return PagesOf(branch, 0); }  // not for a leaf
  static std::unique_ptr<Branch> NewBranch(const Branch& like);
  // The branch at `from` or before it that ends after `pages` pages; splits one if necessary.
  Branch* EndingAt(Branch& from, int64_t pages);
  Branch* Split(Branch& branch, int64_t pages);
  void Join(Branch& branch);  // into its only child, if memory allows
  void Link(Branch& branch, Branch& parent);
  static void Unlink(Branch& branch);
  void SetLastUsed(Branch& branch, TimePoint when);
  // Call after any change that the sums, the order or the parent depend on.
  void Update(Branch& branch);
  // Call when a reason to keep the branch has gone: deletes or joins what is no longer needed.
  void Release(Branch* branch);
  void GivePages(Branch& branch);
  void Delete(Branch& branch);
  // The least recently used branch that may be evicted: of the tenant, or with `others` also of
  // tenants beyond their parts; null: none. Considers only each tenant's oldest: if the last pages
  // of another tenant's oldest branch are within its part, that tenant loses none.
  Branch* Oldest(int tenant, bool others) const;
  void Evict(Branch& branch, int tenant, const std::function<int64_t()>& missing, TimePoint now);
  static int64_t LastPagesBytes(const Branch& branch);
  bool Consistent(const Branch& branch) const;

  PagePool pool_;
  Ledger ledger_;
  Ledger& lists_;
  Branch root_;                      // common root of all tenants' trees; has no pages
  std::vector<IdleOrder> idle_;      // by tenant
  std::vector<int64_t> idle_bytes_;  // by tenant: branches that need not stay
  int64_t shared_bytes_ = 0;
  EvictionStats evictions_;
};

}  // namespace attend
