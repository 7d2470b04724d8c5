// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/page_pool.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <new>
#include <string>
#include <utility>

namespace attend {

PagePool::PagePool(HostSpan memory, int64_t slab_bytes, std::function<void(char*, int64_t)> on_free)
    : memory_(memory), slab_bytes_(slab_bytes), on_free_(std::move(on_free)) {
  assert(slab_bytes % kPageUnitBytes == 0);
  // The first slab begins one unit late, so that no page has the number 0; and no page's number is
  // beyond what PageNumber holds.
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

Status PagePool::Lacking(int64_t page_bytes, int64_t count, int64_t kept_bytes) const {
  const int64_t missing = (count - Room(page_bytes)) * page_bytes + kept_bytes;
  std::string message = "sessions need " + std::to_string(count) + " more pages of " +
                        std::to_string(page_bytes) + " bytes, " + std::to_string(missing) +
                        " bytes more than are free of " + std::to_string(stats_.total_bytes);
  if (kept_bytes > 0) {
    message += " beside " + std::to_string(kept_bytes) + " for tenants within their shares";
  }
  return ResourceExhausted(message + " (session-memory)");
}

Status PagePool::Take(int64_t page_bytes, int64_t count, std::vector<PageNumber>& pages) {
  assert(page_bytes > 0 && page_bytes % kPageUnitBytes == 0);
  if (count > Room(page_bytes)) return Lacking(page_bytes, count);
  const size_t before = pages.size();
  pages.reserve(before + static_cast<size_t>(count));
  try {
    for (int64_t n = 0; n < count; ++n) pages.push_back(TakeOne(page_bytes));
  } catch (const std::bad_alloc&) {
    DropReferences(std::span(pages).subspan(before));
    pages.resize(before);
    throw;
  }
  return Status();
}

PageNumber PagePool::TakeOne(int64_t page_bytes) {
  SlabSet& open = with_room_[page_bytes];
  if (open.empty()) Open(*unused_.begin(), page_bytes);
  const int64_t slab = *open.begin();
  Slab& from = slabs_[slab];
  const int32_t index = from.free.back();
  from.free.pop_back();
  if (from.free.empty()) from.entry = open.extract(slab);
  from.counts[index] = 1;
  --free_pages_[page_bytes];
  stats_.used_bytes += page_bytes;
  return NumberOf(slab, index, page_bytes);
}

void PagePool::Open(int64_t slab, int64_t page_bytes) {
  // What may fail comes first.
  const int64_t count = PagesOf(page_bytes);
  Slab opened;
  opened.page_bytes = page_bytes;
  opened.counts.assign(static_cast<size_t>(count), 0);
  opened.leaving.assign(static_cast<size_t>(count), 0);
  opened.free.resize(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) opened.free[n] = static_cast<int32_t>(count - 1 - n);
  int64_t& free_pages = free_pages_[page_bytes];
  with_room_[page_bytes].insert(unused_.extract(slab));
  free_pages += count;
  slabs_[slab] = std::move(opened);
  stats_.free_bytes -= slab_bytes_;
}

void PagePool::AddReferences(std::span<const PageNumber> pages) {
  for (const PageNumber page : pages) {
    const Place place = PlaceOf(page);
    Slab& slab = slabs_[place.slab];
    assert(slab.counts[place.index] > 0);
    if (++slab.counts[place.index] == 2) stats_.shared_bytes += slab.page_bytes;
  }
}

PagePool::Change PagePool::DropReferences(std::span<const PageNumber> pages, bool leaving) {
  Change change;
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) Drop(*page, 1, leaving, change);
  return change;
}

PagePool::Change PagePool::DropReferences(PageNumber page, int64_t times) {
  Change change;
  Drop(page, times, false, change);
  return change;
}

int64_t PagePool::Leave(std::span<const PageNumber> pages) {
  int64_t coming = 0;
  for (const PageNumber page : pages) {
    const Place place = PlaceOf(page);
    Slab& slab = slabs_[place.slab];
    ++slab.leaving[place.index];
    assert(slab.leaving[place.index] <= slab.counts[place.index]);
    coming += slab.coming(place.index) ? 1 : 0;
  }
  return coming;
}

void PagePool::Drop(PageNumber page, int64_t times, bool leaving, Change& change) {
  const Place place = PlaceOf(page);
  Slab& slab = slabs_[place.slab];
  const int64_t page_bytes = slab.page_bytes;
  const int64_t before = slab.counts[place.index];
  assert(0 < times && times <= before);
  change.coming -= slab.coming(place.index) ? 1 : 0;
  if (leaving) --slab.leaving[place.index];
  const int64_t left = before - times;
  slab.counts[place.index] = static_cast<int32_t>(left);
  assert(0 <= slab.leaving[place.index] && slab.leaving[place.index] <= left);
  change.coming += slab.coming(place.index) ? 1 : 0;
  if (before > 1 && left <= 1) stats_.shared_bytes -= page_bytes;
  if (left > 0) return;
  ++change.freed;
  if (on_free_) on_free_(data(page), page_bytes);
  stats_.used_bytes -= page_bytes;
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

int64_t PagePool::references(PageNumber page) const {
  const Place place = PlaceOf(page);
  return slabs_[place.slab].counts[place.index];
}

int64_t PagePool::leaving(PageNumber page) const {
  const Place place = PlaceOf(page);
  return slabs_[place.slab].leaving[place.index];
}

bool PagePool::Consistent(std::vector<PageNumber> held, std::vector<PageNumber> leaving) const {
  std::sort(held.begin(), held.end());  // as the slabs have them
  std::sort(leaving.begin(), leaving.end());
  auto next = held.cbegin(), leaves = leaving.cbegin();
  Stats sums;
  sums.total_bytes = stats_.total_bytes;
  std::map<int64_t, int64_t> free_pages;
  for (int64_t n = 0; n < std::ssize(slabs_); ++n) {
    const Slab& slab = slabs_[n];
    if ((slab.page_bytes == 0) != unused_.contains(n)) return false;
    if (slab.page_bytes == 0) {
      sums.free_bytes += slab_bytes_;
      continue;
    }
    const auto unreferenced = std::count(slab.counts.begin(), slab.counts.end(), 0);
    if (unreferenced != std::ssize(slab.free) || unreferenced == std::ssize(slab.counts)) {
      return false;
    }
    const std::set<int32_t> free(slab.free.begin(), slab.free.end());
    if (std::ssize(free) != unreferenced) return false;  // one of them is there twice
    for (const int32_t index : free) {
      if (slab.counts[index] != 0) return false;
    }
    for (int64_t index = 0; index < std::ssize(slab.counts); ++index) {
      const int32_t count = slab.counts[index];
      const PageNumber page = NumberOf(n, index, slab.page_bytes);
      const auto end = std::upper_bound(next, held.cend(), page);
      const auto leaves_end = std::upper_bound(leaves, leaving.cend(), page);
      if (end - next != count || leaves_end - leaves != slab.leaving[index]) return false;
      next = end;
      leaves = leaves_end;
      if (count > 0) sums.used_bytes += slab.page_bytes;
      if (count > 1) sums.shared_bytes += slab.page_bytes;
    }
    free_pages[slab.page_bytes] += unreferenced;
    const auto open = with_room_.find(slab.page_bytes);
    if (open == with_room_.end() || open->second.contains(n) != !slab.free.empty()) return false;
  }
  for (const auto& [page_bytes, count] : free_pages_) {
    const auto found = free_pages.find(page_bytes);
    if (count != (found == free_pages.end() ? 0 : found->second)) return false;
  }
  return next == held.cend() && leaves == leaving.cend() && sums.used_bytes == stats_.used_bytes &&
         sums.free_bytes == stats_.free_bytes && sums.shared_bytes == stats_.shared_bytes;
}

}  // namespace attend
