// SPDX-License-Identifier: Apache-2.0
//
// Pages of K and V in one device's memory. The memory is carved into slabs of one size. A slab
// serves pages of one size at a time, and is given back whole when the last of them is free, so
// that no mix of shapes leaves memory that another shape cannot use.
//
// Pages are counted by reference: a page is free when nobody refers to it any more. Numbers of
// pages are what kernels read (PageTable): page n is at base + n * kPageUnitBytes. Page 0 is never
// handed out, so that a number that was never set is nobody's.
//
// A reference is leaving if whoever has it only waits to drop it. A page whose references are all
// leaving is coming back.
//
// Not thread-safe; the caller locks.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"

namespace attend {

using PageNumber = int32_t;

// Numbers count these, whatever the size of a page, so that one table reaches any of them.
inline constexpr int64_t kPageUnitBytes = 256;

class PagePool {
 public:
  struct Stats {
    int64_t total_bytes = 0;   // of the slabs
    int64_t used_bytes = 0;    // of pages that somebody refers to
    int64_t free_bytes = 0;    // of slabs that serve no size
    int64_t shared_bytes = 0;  // of used pages with more than one reference, each counted once
  };

  // `memory` is kPageUnitBytes-aligned and stays the caller's. `slab_bytes` is a multiple of
  // kPageUnitBytes. `on_free`, if set, is called with each page that becomes free.
  PagePool(HostSpan memory, int64_t slab_bytes,
           std::function<void(char* data, int64_t page_bytes)> on_free = {});
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Appends `count` pages, each with one reference, to `pages`. All or none: RESOURCE_EXHAUSTED
  // names the bytes that are missing. `page_bytes` is a multiple of kPageUnitBytes, at most
  // the bytes of a slab.
  Status Take(int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages);
  // What Take says if there is no room for them beside `kept_bytes`, which others wait for.
  Status Lacking(int64_t page_bytes, int64_t count, int64_t kept_bytes = 0) const;
  // How many pages of that size could be taken now.
  int64_t Room(int64_t page_bytes) const;

  void AddReferences(std::span<const PageNumber> pages);
  // How many pages have become free, and how many more are coming back.
  struct Change {
    int64_t freed = 0;
    int64_t coming = 0;
  };
  // From the last to the first, so that the front of a sequence is what is used again first.
  // `leaving`: Leave was called for these references.
  Change DropReferences(std::span<const PageNumber> pages, bool leaving = false);
  // `times` references to that page, none of which are leaving.
  Change DropReferences(PageNumber page, int64_t times);
  // One reference to each of them is leaving from now on. Returns how many more pages are coming
  // back.
  int64_t Leave(std::span<const PageNumber> pages);
  int64_t references(PageNumber page) const;
  int64_t leaving(PageNumber page) const;  // of these
  int64_t page_bytes(PageNumber page) const { return slabs_[PlaceOf(page).slab].page_bytes; }

  char* base() const { return static_cast<char*>(memory_.data); }
  char* data(PageNumber page) const { return base() + int64_t{page} * kPageUnitBytes; }
  const HostSpan& memory() const { return memory_; }
  const Stats& stats() const { return stats_; }
  // Whether every page of every slab is either free or has as many references as `held` has
  // entries of it, of which `leaving` has those that are, and the sums agree. For tests and debug
  // builds: looks at everything.
  bool Consistent(std::vector<PageNumber> held, std::vector<PageNumber> leaving = {}) const;

 private:
  using SlabSet = std::set<int64_t>;
  struct Slab {
    int64_t page_bytes = 0;        // 0: serves no size
    std::vector<int32_t> counts;   // references, by the page's index in the slab
    std::vector<int32_t> leaving;  // of these
    std::vector<int32_t> free;     // indices, the next to be used last

    bool coming(int64_t index) const {
      return counts[index] > 0 && counts[index] == leaving[index];
    }
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
  void Drop(PageNumber page, int64_t times, bool leaving, Change& change);

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
