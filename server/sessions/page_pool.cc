// SPDX-License-Identifier: Apache-2.0
//
// A slab allocator. The lowest slab with a free page is used first, so that the others can drain
// and be reused for another page size. Set nodes move between `unused_`, `with_room_` and
// `Slab::entry` instead of being allocated, so Give cannot fail. Page 1 is the first unit of slab
// 0.

#include "server/sessions/page_pool.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <new>
#include <utility>

namespace attend {

PagePool::PagePool(HostSpan memory, int64_t slab_bytes, std::function<void(char*, int64_t)> on_free)
    : memory_(memory), slab_bytes_(slab_bytes), on_free_(std::move(on_free)) {
  assert(slab_bytes % kPageUnitBytes == 0);
  // The first slab begins one unit late, so that no page has number 0. Page numbers must also fit
  // PageNumber.
  const int64_t numbered = int64_t{std::numeric_limits<PageNumber>::max()} * kPageUnitBytes;
  const int64_t bytes = std::min(memory.bytes, numbered) - kPageUnitBytes;
  const int64_t count = bytes < slab_bytes ? 0 : bytes / slab_bytes;
  slabs_.resize(static_cast<size_t>(count));
  for (int64_t slab = 0; slab < count; ++slab) unused_.insert(slab);
  stats_.total_bytes = stats_.free_bytes = count * slab_bytes;
}

PagePool::Place PagePool::PlaceOf(PageNumber page) const {
  const int64_t offset = (int64_t{page} - 1) * kPageUnitBytes;
  const int64_t slab = offset / slab_bytes_;
  return {slab, offset % slab_bytes_ / slabs_[slab].page_bytes};
}

PageNumber PagePool::NumberOf(int64_t slab, int64_t index, int64_t page_bytes) const {
  return static_cast<PageNumber>(1 + (slab * slab_bytes_ + index * page_bytes) / kPageUnitBytes);
}

int64_t PagePool::Room(int64_t page_bytes) const {
  if (page_bytes > slab_bytes_) return 0;
  const auto served = free_pages_.find(page_bytes);
  const int64_t pages = served == free_pages_.end() ? 0 : served->second;
  return pages + std::ssize(unused_) * PagesOf(page_bytes);
}

void PagePool::Take(int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages) {
  assert(page_bytes > 0 && page_bytes % kPageUnitBytes == 0);
  assert(count <= Room(page_bytes));
  const size_t before = pages.size();
  pages.reserve(before + static_cast<size_t>(count));
  try {
    for (int64_t n = 0; n < count; ++n) pages.push_back(TakeOne(page_bytes));
  } catch (const std::bad_alloc&) {
    Give(std::span(pages).subspan(before));
    pages.resize(before);
    throw;
  }
}

PageNumber PagePool::TakeOne(int64_t page_bytes) {
  SlabSet& open = with_room_[page_bytes];
  if (open.empty()) Open(*unused_.begin(), page_bytes);
  const int64_t slab = *open.begin();
  Slab& from = slabs_[slab];
  const int32_t index = from.free.back();
  from.free.pop_back();
  if (from.free.empty()) from.entry = open.extract(slab);
  from.taken[index] = true;
  --free_pages_[page_bytes];
  stats_.used_bytes += Charge(page_bytes);
  return NumberOf(slab, index, page_bytes);
}

void PagePool::Open(int64_t slab, int64_t page_bytes) {
  // Steps that may throw come first.
  const int64_t count = PagesOf(page_bytes);
  Slab opened;
  opened.page_bytes = page_bytes;
  opened.taken.assign(static_cast<size_t>(count), false);
  opened.free.resize(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) opened.free[n] = static_cast<int32_t>(count - 1 - n);
  int64_t& free_pages = free_pages_[page_bytes];
  with_room_[page_bytes].insert(unused_.extract(slab));
  free_pages += count;
  slabs_[slab] = std::move(opened);
  stats_.free_bytes -= slab_bytes_;
}

void PagePool::Give(std::span<const PageNumber> pages) {
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) GiveOne(*page);
}

void PagePool::GiveOne(PageNumber page) {
  const Place place = PlaceOf(page);
  Slab& slab = slabs_[place.slab];
  const int64_t page_bytes = slab.page_bytes;
  assert(slab.taken[place.index]);
  slab.taken[place.index] = false;
  if (on_free_) on_free_(data(page), page_bytes);
  stats_.used_bytes -= Charge(page_bytes);
  slab.free.push_back(static_cast<int32_t>(place.index));
  SlabSet& open = with_room_[page_bytes];
  if (!slab.entry.empty()) open.insert(std::move(slab.entry));
  ++free_pages_[page_bytes];
  if (std::ssize(slab.free) < PagesOf(page_bytes)) return;
  unused_.insert(open.extract(place.slab));
  free_pages_[page_bytes] -= std::ssize(slab.free);
  slab = Slab();
  stats_.free_bytes += slab_bytes_;
}

bool PagePool::Consistent(std::vector<PageNumber> taken) const {
  std::sort(taken.begin(), taken.end());  // in slab order
  auto next = taken.cbegin();
  Stats sums;
  std::map<int64_t, int64_t> free_pages;
  for (int64_t n = 0; n < std::ssize(slabs_); ++n) {
    const Slab& slab = slabs_[n];
    if ((slab.page_bytes == 0) != unused_.contains(n)) return false;
    if (slab.page_bytes == 0) {
      sums.free_bytes += slab_bytes_;
      continue;
    }
    const std::set<int32_t> free(slab.free.begin(), slab.free.end());
    if (free.size() != slab.free.size() || free.size() == slab.taken.size()) return false;
    for (int64_t index = 0; index < std::ssize(slab.taken); ++index) {
      if (slab.taken[index] == free.contains(static_cast<int32_t>(index))) return false;
      if (!slab.taken[index]) continue;
      if (next == taken.cend() || *next++ != NumberOf(n, index, slab.page_bytes)) return false;
      sums.used_bytes += Charge(slab.page_bytes);
    }
    free_pages[slab.page_bytes] += std::ssize(slab.free);
    const auto open = with_room_.find(slab.page_bytes);
    if (open == with_room_.end() || open->second.contains(n) != !slab.free.empty()) return false;
  }
  for (const auto& [page_bytes, count] : free_pages_) {
    const auto found = free_pages.find(page_bytes);
    if (count != (found == free_pages.end() ? 0 : found->second)) return false;
  }
  return next == taken.cend() && sums.used_bytes == stats_.used_bytes &&
         sums.free_bytes == stats_.free_bytes;
}

}  // namespace attend
