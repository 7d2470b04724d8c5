// SPDX-License-Identifier: Apache-2.0
//
// A page of the arena has all KV heads, but a check may see different pages of each head. The copy
// keeps (page, head) pairs only, in places of one head's K and V. To let an ordinary page table
// describe it, stride_h is one place, so head h of table entry e lies at place e + h: an entry
// claims places e + h only for the heads present, and entries with disjoint heads interleave.
// Places finds such e by first fit. An entry may be negative if its first head is not 0.

#include "server/engine/fetched_keys.h"

#include <algorithm>
#include <string>
#include <utility>

namespace attend {
namespace {

// Page n of a sequence's KV head.
struct HeadPage {
  int64_t b = 0, n = 0, h = 0;
  auto operator<=>(const HeadPage&) const = default;
};

// The rows with their KV head instead of their query head, sorted by sequence, head and row.
std::vector<RowId> ByKvHead(const Problem& p, std::span<const RowId> rows) {
  std::vector<RowId> sorted;
  for (const RowId& row : rows) sorted.push_back({row.b, row.h / p.group(), row.i});
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

// Calls visit(page) once for each page visible to one of the rows, which are sorted as above.
template <class Visit>
void VisitPages(const Attention& a, const std::vector<RowId>& rows, const Visit& visit) {
  const int64_t page_rows = a.problem.page_rows;
  const RowId* last = nullptr;
  int64_t next = 0;  // of this head: all pages before it are done
  for (const RowId& row : rows) {
    if (last == nullptr || row.b != last->b || row.h != last->h) next = 0;
    last = &row;
    const Sequence s = SequenceOf(a, row.b);
    const KeyRange keys = VisibleKeys(a.problem.mask, s, row.i);
    if (row.i >= s.q_len || keys.begin >= keys.end) continue;
    // Within a head, both ends of the visible range grow with the row, so `next` never goes back.
    for (next = std::max(next, keys.begin / page_rows); next * page_rows < keys.end; ++next) {
      visit(HeadPage{row.b, next, row.h});
    }
  }
}

// Allocates places for the pages of one (sequence, page number), by first fit; see the file's head.
class Places {
 public:
  explicit Places(int64_t heads) : heads_(heads) {}

  // Returns an entry, possibly negative, for the pages of these heads, given in rising order.
  int64_t Add(std::span<const HeadPage> pages) {
    // Searches only the last heads_ places, to keep the cost independent of the number of pages.
    const int64_t reach = std::max<int64_t>(0, count() - heads_);
    int64_t entry = reach - pages.front().h;
    while (!Fits(entry, pages)) ++entry;
    taken_.resize(static_cast<size_t>(std::max(count(), entry + pages.back().h + 1)));
    for (const HeadPage& page : pages) taken_[static_cast<size_t>(entry + page.h)] = true;
    return entry;
  }
  int64_t count() const { return std::ssize(taken_); }

 private:
  bool Fits(int64_t entry, std::span<const HeadPage> pages) const {
    return std::none_of(pages.begin(), pages.end(), [&](const HeadPage& page) {
      const int64_t place = entry + page.h;
      return place < count() && taken_[static_cast<size_t>(place)];
    });
  }

  const int64_t heads_;
  std::vector<bool> taken_;
};

// Appends the copies of K or V of one page; one run if its rows are contiguous.
void AddPieces(const Attention& from, const ConstTensorView& source, const Attention& to,
               const ConstTensorView& target, int64_t dim, const HeadPage& page,
               std::vector<HostPiece>& pieces) {
  const Problem& p = from.problem;
  const Sequence s = SequenceOf(from, page.b);
  const int64_t size = DTypeBytes(p.dtype);
  const int64_t end = std::min(s.k_len, (page.n + 1) * p.page_rows);
  for (int64_t j = page.n * p.page_rows, run = 1; j < end; j += run) {
    if (source.stride_l == dim) run = end - j;
    pieces.push_back({static_cast<const char*>(source.data) +
                          KeyElement(from, source, s, page.b, page.h, j) * size,
                      static_cast<char*>(const_cast<void*>(target.data)) +
                          KeyElement(to, target, s, page.b, page.h, j) * size,
                      run * dim * size});
  }
}

}  // namespace

Result<FetchedKeys> FetchedKeys::Fetch(const Attention& a, DeviceArena& arena,
                                       std::span<const RowId> rows, HostPool& pool, int tenant,
                                       int64_t bytes_max) {
  const Problem& p = a.problem;
  const std::vector<RowId> sorted = ByKvHead(p, rows);
  const int64_t page_elements = p.page_rows * (p.dim + p.dim_v);
  const int64_t page_bytes = page_elements * DTypeBytes(p.dtype);
  int64_t count = 0, longest = 0;
  VisitPages(a, sorted, [&](const HeadPage& page) {
    ++count;
    longest = std::max(longest, page.n + 1);
  });
  if (count * page_bytes > bytes_max) {
    return InvalidArgument("check: the keys that the checked rows see take " +
                           std::to_string(count * page_bytes) +
                           " bytes, a check may copy at most " + std::to_string(bytes_max));
  }
  std::vector<HeadPage> pages;
  pages.reserve(static_cast<size_t>(count));
  VisitPages(a, sorted, [&](const HeadPage& page) { pages.push_back(page); });
  std::sort(pages.begin(), pages.end());

  FetchedKeys keys;
  keys.pages_.resize(static_cast<size_t>(p.batch * longest));
  Places places(p.heads_kv);
  for (auto first = pages.begin(); first != pages.end();) {
    const auto last = std::find_if(first, pages.end(), [&](const HeadPage& page) {
      return page.b != first->b || page.n != first->n;
    });
    keys.pages_[static_cast<size_t>(first->b * longest + first->n)] =
        static_cast<int32_t>(places.Add({first, last}));
    first = last;
  }
  Result<HostBlock> memory = pool.Take(tenant, places.count() * page_bytes);
  if (!memory.ok()) return Status(memory.status().code(), "check: " + memory.status().message());
  keys.memory_ = *std::move(memory);

  Attention& host = keys.attention_;
  host = a;
  host.k.data = host.v.data = keys.memory_.data();
  if (!pages.empty()) {  // each place holds K, then V
    host.v.data =
        static_cast<char*>(keys.memory_.data()) + p.page_rows * p.dim * DTypeBytes(p.dtype);
  }
  host.k.stride_b = host.v.stride_b = host.k.stride_h = host.v.stride_h = page_elements;
  host.k.stride_l = p.dim;
  host.v.stride_l = p.dim_v;
  host.kv_pages = {keys.pages_.data(), longest};
  std::vector<HostPiece> pieces;
  for (const HeadPage& page : pages) {
    AddPieces(a, a.k, host, host.k, p.dim, page, pieces);
    AddPieces(a, a.v, host, host.v, p.dim_v, page, pieces);
  }
  ATTEND_RETURN_IF_ERROR(arena.Copy(pieces));
  return keys;
}

}  // namespace attend
