// SPDX-License-Identifier: Apache-2.0
//
// Pages of K and V in one device's memory. The memory is divided into slabs of equal size. A slab
// serves pages of one size at a time, and is returned whole when the last of them is free, so that
// no mix of shapes leaves memory that another shape cannot use.
//
// Invariant: each page of a slab is either free or taken by exactly one owner. Kernels read page
// numbers (PageTable): page n is at base + n * kPageUnitBytes. Page 0 is never handed out, so a
// number that was never set names no page.
//
// Not thread-safe; the caller locks. Returning a page allocates nothing.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"

namespace attend {

using PageNumber = int32_t;

// Page numbers count these units, whatever the page size, so that one table can address all pages.
inline constexpr int64_t kPageUnitBytes = 256;

class PagePool {
 public:
  struct Stats {
    int64_t total_bytes = 0;  // of all slabs
    int64_t used_bytes = 0;   // charged for taken pages
    int64_t free_bytes = 0;   // of slabs that serve no page size
  };

  // `memory` must be kPageUnitBytes-aligned and remains the caller's. `slab_bytes` is a multiple of
  // kPageUnitBytes. `on_free`, if set, is called with each page that becomes free.
  PagePool(HostSpan memory, int64_t slab_bytes,
           std::function<void(char* data, int64_t page_bytes)> on_free = {});
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Appends `count` pages, at most Room(page_bytes), to `pages`. `page_bytes` is a multiple of
  // kPageUnitBytes. If an allocation throws, nothing is taken.
  void Take(int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages);
  // How many pages of that size could be taken now.
  int64_t Room(int64_t page_bytes) const;
  // Frees from last to first, so that the front of a sequence is reused first.
  void Give(std::span<const PageNumber> pages);
  int64_t page_bytes(PageNumber page) const { return slabs_[PlaceOf(page).slab].page_bytes; }
  // The share of a slab that one page uses, remainder included: at least page_bytes.
  int64_t Charge(int64_t page_bytes) const { return slab_bytes_ / PagesOf(page_bytes); }

  char* base() const { return static_cast<char*>(memory_.data); }
  char* data(PageNumber page) const { return base() + int64_t{page} * kPageUnitBytes; }
  const Stats& stats() const { return stats_; }
  // Whether exactly the pages in `taken` are taken, each once, and the sums agree. For tests and
  // debug builds: O(all pages).
  bool Consistent(std::vector<PageNumber> taken) const;

 private:
  using SlabSet = std::set<int64_t>;
  struct Slab {
    int64_t page_bytes = 0;     // 0: serves no page size
    std::vector<bool> taken;    // by the page's index in the slab
    std::vector<int32_t> free;  // indices; the next one to use is last
    // The node of a full slab, which is in no set: kept so that returning a page allocates nothing.
    SlabSet::node_type entry = {};
  };
  struct Place {
    int64_t slab = 0;
    int64_t index = 0;
  };

  int64_t PagesOf(int64_t page_bytes) const { return slab_bytes_ / page_bytes; }
  Place PlaceOf(PageNumber page) const;
  PageNumber NumberOf(int64_t slab, int64_t index, int64_t page_bytes) const;
  PageNumber TakeOne(int64_t page_bytes);  // requires room
  void Open(int64_t slab, int64_t page_bytes);
  void GiveOne(PageNumber page);

  const HostSpan memory_;
  const int64_t slab_bytes_;
  const std::function<void(char*, int64_t)> on_free_;
  std::vector<Slab> slabs_;
  SlabSet unused_;                         // slabs that serve no page size
  std::map<int64_t, SlabSet> with_room_;   // by page size: slabs with a free page
  std::map<int64_t, int64_t> free_pages_;  // by page size: free pages in slabs that serve it
  Stats stats_;
};

}  // namespace attend
