// SPDX-License-Identifier: Apache-2.0
//
// The pages of one device's sessions: who has them, and which go when memory is short.
//
// Sessions that were forked from each other begin with the same pages. So pages are in the branches
// of a tree: a branch has the pages, of each layer, that follow those of its parent. Each session
// ends with a branch of its own, its leaf, and its pages are those from the root to there. A fork
// splits a branch in two where it begins; a branch that only one other goes on from is joined to it
// again. So each page has one branch, or was taken and is in none yet; no page is counted by
// reference, and no call looks at the sessions that share one.
//
//              [0, 2)                  what all begin with: 2 pages of each layer
//             /      \                                                                      .
//        [2, 5)      [2, 3)            the leaf of a session of 3 pages
//        /    \                                                                             .
//   [5, 5)    [5, 9)                   two leaves: forks that have 5 pages in common
//
// The ledger says which tenant may have how many pages. An idle branch may be evicted: one from
// which no other goes on, which no request reads and which no session that is pinned or in use ends
// with. It is the needy tenant's own, or that of a tenant that holds more than its own part, and
// then only what is beyond it may go. It loses pages from its end, of all layers alike; the one
// that was used longest ago goes first. What many have in common was used when the last of them
// was, and goes after all that follows it. A session is not told: its leaf is empty then, and
// Settle says where it ends now.
//
// A branch costs its tenant's tables nothing but its pages' entries: a session's room there has
// room for its leaf and one branch before it, and there are never more, as each has two after it.
//
// Not thread-safe: under the session table's lock. Unless a line says otherwise, a call is
// O(log n) in the number of branches and O(1) in pages beside those that it gives, takes or moves.
// Steps that may fail for want of memory come before anything is changed.

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

// A page's entry in a list, which has room for up to twice as many as it has.
inline constexpr int64_t kPageEntryBytes = 2 * sizeof(PageNumber);

struct EvictionStats {
  // The buckets of the histogram of how long pages had not been used when they were evicted.
  static constexpr std::array<double, 10> kIdleBoundsSeconds = {0.1, 1,   5,   10,   30,
                                                                60,  300, 900, 3600, 21600};
  int64_t evictions_own = 0;     // for the tenant's own needs
  int64_t evictions_others = 0;  // for others', of what exceeded the tenant's part
  int64_t evicted_bytes = 0;
  double evicted_idle_seconds = 0;  // sum over evictions
  // Up to each of kIdleBoundsSeconds, but no lower one; the last is beyond them.
  std::array<int64_t, kIdleBoundsSeconds.size() + 1> evictions_by_idle = {};

  void Add(const EvictionStats& other);
};

class PageTree {
 public:
  struct Branch;
  using IdleOrder = std::set<std::pair<TimePoint, Branch*>>;
  // Others read what comes first; the tree alone changes it.
  struct Branch {
    int tenant = 0;
    std::shared_ptr<const std::vector<int64_t>> page_bytes;  // by layer, as charged
    int64_t begin = 0;                                       // pages of each layer before it
    std::vector<std::vector<PageNumber>> pages;              // by layer

    bool leaf = false;      // a session ends with it
    bool kept = false;      // that session is pinned, or in use
    int64_t pins = 0;       // requests, forks and truncations that read it
    int64_t bytes = 0;      // of its pages
    TimePoint last_used{};  // or what followed it
    Branch* parent = nullptr;
    Branch* first_child = nullptr;
    Branch* next = nullptr;  // of its parent's children
    Branch* previous = nullptr;
    int64_t children = 0;
    int64_t blockers = 0;                      // children that must go first
    bool blocks = false;                       // it is one of its parent's
    int64_t stayers = 0;                       // children that stay, whatever is needed
    bool stays = false;                        // it is one of its parent's
    int64_t idle_bytes = 0, shared_bytes = 0;  // as they are in the sums
    IdleOrder::node_type entry = {};           // while it is not in the order
  };
  struct Stats : PagePool::Stats {
    int64_t shared_bytes = 0;  // of pages that several sessions have, each counted once
  };

  // `lists` bounds what all page lists may take, and must outlive the tree, as must `memory`.
  PageTree(HostSpan memory, int64_t slab_bytes,
           std::function<void(char* data, int64_t page_bytes)> on_free,
           const TenantWeights& weights, Ledger& lists);
  ~PageTree();
  PageTree(const PageTree&) = delete;
  PageTree& operator=(const PageTree&) = delete;

  // Takes pages, which are the caller's until it appends them to a leaf or gives them back. Nothing
  // is missing for them (Missing), and the lists have room.
  void Take(int tenant, int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages);
  void Give(int tenant, std::span<const PageNumber> pages);
  // How many bytes must go before the tenant can take so many pages; 0 or less: none.
  int64_t Missing(int tenant, int64_t page_bytes, int64_t count) const;
  // Whether so many bytes may be there if all is evicted that may be. An upper bound: it counts
  // other tenants' bytes, which go by pages of all layers alike. O(tenants).
  bool MayMakeRoom(int tenant, int64_t bytes) const;
  // Evicts until nothing is missing, and returns whether that is so. Evicts nothing if that would
  // be too little, as far as MayMakeRoom knows. O(tenants) for each branch that loses pages,
  // O(layers) for each page of each.
  bool MakeRoom(int tenant, int64_t page_bytes, int64_t count, TimePoint now);
  // The same for so many bytes of the tenant's own.
  bool EvictOwn(int tenant, int64_t bytes, TimePoint now);

  // A new session's leaf, without pages; `page_bytes` are charges.
  Branch* Plant(int tenant, std::shared_ptr<const std::vector<int64_t>> page_bytes, bool kept,
                TimePoint now);
  // Another one, which begins with the first `pages` pages of each layer. All of these are full.
  Branch* Fork(Branch& leaf, int64_t pages, bool kept, TimePoint now);
  // Each layer keeps so many pages. What is read stays with those who read it. Returns the
  // session's leaf from now on, where `room` more pages can be appended to each layer.
  Branch* Cut(Branch& leaf, std::span<const int64_t> kept, int64_t room);
  // The session has ended.
  void Leave(Branch& leaf);
  // Finds out what eviction has left of what comes before an empty leaf.
  void Settle(Branch& leaf);
  // The pages that are appended have been taken. After Reserve for as many it takes no memory.
  static void Reserve(Branch& leaf, size_t layer, int64_t more);
  void Append(Branch& leaf, size_t layer, std::span<const PageNumber> pages);
  // A list that needs less than half of its memory moves to less, if it can.
  static void Fit(Branch& leaf, size_t layer);
  // Whether its session is pinned, or in use.
  void Keep(Branch& leaf, bool kept);
  // While it is pinned, its pages and all before it stay, whatever becomes of the session.
  void Pin(Branch& branch);
  void Unpin(Branch& branch);
  void Touch(Branch& leaf, TimePoint now);

  // For a leaf that is settled: the pages of a layer, which page is where, and all of them. Both of
  // the latter are O(depth).
  static int64_t PagesOf(const Branch& leaf, size_t layer) {
    return leaf.begin + std::ssize(leaf.pages[layer]);
  }
  static PageNumber PageAt(const Branch& leaf, size_t layer, int64_t index);
  static PageNumber* CopyPages(const Branch& leaf, size_t layer, PageNumber* to);
  // Whether someone reads its own pages, or those that it had before a cut.
  static bool IsRead(const Branch& leaf) { return leaf.pins > 0 || leaf.children > 0; }

  char* data(PageNumber page) const { return pool_.data(page); }
  const Ledger& ledger() const { return ledger_; }
  // The bytes that a page is charged there: its part of a slab.
  int64_t Charge(int64_t page_bytes) const { return pool_.Charge(page_bytes); }
  Stats stats() const { return {pool_.stats(), shared_bytes_}; }
  const EvictionStats& evictions() const { return evictions_; }
  // Whether all of the above is so. `taken`, by tenant: the pages that are in no branch; `pins`:
  // all there are. Looks at everything.
  bool Consistent(const std::vector<std::vector<PageNumber>>& taken, int64_t pins) const;

 private:
  static int64_t End(const Branch& branch) { return PagesOf(branch, 0); }  // of no leaf
  static std::unique_ptr<Branch> NewBranch(const Branch& like);
  // The branch at `from` or before it that ends after so many pages, which may be split off.
  Branch* EndingAt(Branch& from, int64_t pages);
  Branch* Split(Branch& branch, int64_t pages);
  void Join(Branch& branch);  // to its only child, if there is memory
  void Link(Branch& branch, Branch& parent);
  static void Unlink(Branch& branch);
  void SetLastUsed(Branch& branch, TimePoint when);
  // After anything of it has changed that the sums, the order or its parent depend on.
  void Update(Branch& branch);
  // Something that kept it has gone.
  void Release(Branch* branch);
  void GivePages(Branch& branch);
  void Delete(Branch& branch);
  // The tenant's, or if others' count too, theirs beyond their parts; null: none may go. Looks at
  // each tenant's oldest alone: of another's, whose last pages it has within its part, none goes.
  Branch* Oldest(int tenant, bool others) const;
  void Evict(Branch& branch, int tenant, const std::function<int64_t()>& missing, TimePoint now);
  static int64_t LastPagesBytes(const Branch& branch);
  bool Consistent(const Branch& branch) const;

  PagePool pool_;
  Ledger ledger_;
  Ledger& lists_;
  Branch root_;                      // of all tenants' trees; has no pages
  std::vector<IdleOrder> idle_;      // by tenant
  std::vector<int64_t> idle_bytes_;  // by tenant: of branches that need not stay
  int64_t shared_bytes_ = 0;
  EvictionStats evictions_;
};

}  // namespace attend
