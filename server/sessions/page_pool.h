// SPDX-License-Identifier: Apache-2.0
//
// Pages of K and V in one device's memory. The memory is carved into slabs of one size. A slab
// serves pages of one size at a time, and is given back whole when the last of them is free, so
// that no mix of shapes leaves memory that another shape cannot use.
//
// Invariant: each page of a slab is either free or taken, and taken by one owner. Numbers of pages
// are what kernels read (PageTable): page n is at base + n * kPageUnitBytes. Page 0 is never handed
// out, so that a number that was never set names no page.
//
// Not thread-safe; the caller locks. To give a page back takes no memory.

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

// Numbers count these, whatever the size of a page, so that one table reaches any of them.
inline constexpr int64_t kPageUnitBytes = 256;

class PagePool {
 public:
  struct Stats {
    int64_t total_bytes = 0;  // of the slabs
    int64_t used_bytes = 0;   // charged for taken pages
    int64_t free_bytes = 0;   // of slabs that serve no size
  };

  // `memory` is kPageUnitBytes-aligned and stays the caller's. `slab_bytes` is a multiple of
  // kPageUnitBytes. `on_free`, if set, is called with each page that becomes free.
  PagePool(HostSpan memory, int64_t slab_bytes,
           std::function<void(char* data, int64_t page_bytes)> on_free = {});
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Appends `count` pages to `pages`, at most Room(page_bytes). `page_bytes` is a multiple of
  // kPageUnitBytes. Where an allocation throws, nothing is taken.
  void Take(int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages);
  // How many pages of that size could be taken now.
  int64_t Room(int64_t page_bytes) const;
  // From the last to the first, so that the front of a sequence is what is taken again first.
  void Give(std::span<const PageNumber> pages);
  int64_t page_bytes(PageNumber page) const { return slabs_[PlaceOf(page).slab].page_bytes; }
  // A page's part of a slab, with what is left over there: at least page_bytes.
  int64_t Charge(int64_t page_bytes) const { return slab_bytes_ / PagesOf(page_bytes); }

  char* base() const { return static_cast<char*>(memory_.data); }
  char* data(PageNumber page) const { return base() + int64_t{page} * kPageUnitBytes; }
  const Stats& stats() const { return stats_; }
  // Whether `taken` are the pages that are taken, each once, and the sums agree. For tests and
  // debug builds: looks at everything.
  bool Consistent(std::vector<PageNumber> taken) const;

 private:
  using SlabSet = std::set<int64_t>;
  struct Slab {
    int64_t page_bytes = 0;     // 0: serves no size
    std::vector<bool> taken;    // by the page's index in the slab
    std::vector<int32_t> free;  // indices, the next to be used last
    // A full slab's entry, which is in no set: so a page is given back without taking memory.
    SlabSet::node_type entry = {};
  };
  struct Place {
    int64_t slab = 0;
    int64_t index = 0;
  };

  int64_t PagesOf(int64_t page_bytes) const { return slab_bytes_ / page_bytes; }
  Place PlaceOf(PageNumber page) const;
  PageNumber NumberOf(int64_t slab, int64_t index, int64_t page_bytes) const;
  PageNumber TakeOne(int64_t page_bytes);  // there is room
  void Open(int64_t slab, int64_t page_bytes);
  void GiveOne(PageNumber page);

  const HostSpan memory_;
  const int64_t slab_bytes_;
  const std::function<void(char*, int64_t)> on_free_;
  std::vector<Slab> slabs_;
  SlabSet unused_;                         // slabs that serve no size
  std::map<int64_t, SlabSet> with_room_;   // by page size: slabs with a free page
  std::map<int64_t, int64_t> free_pages_;  // by page size, in slabs that serve it
  Stats stats_;
};

}  // namespace attend
