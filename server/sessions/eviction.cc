// SPDX-License-Identifier: Apache-2.0
//
// What sessions lose when others need pages.

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "server/sessions/session_table.h"

namespace attend {
namespace {

// With how many pages both begin. Whoever shares a page shares all before it, so that few are
// looked at.
int64_t SamePages(std::span<const PageNumber> a, std::span<const PageNumber> b) {
  size_t same = 0, end = std::min(a.size(), b.size());
  while (same < end) {
    const size_t middle = same + (end - same) / 2;
    if (a[middle] == b[middle]) {
      same = middle + 1;
    } else {
      end = middle;
    }
  }
  return static_cast<int64_t>(same);
}

// An order in which lists that begin with the same pages are neighbours.
bool PagesBefore(std::span<const PageNumber> a, std::span<const PageNumber> b) {
  const int64_t same = SamePages(a, b);
  if (same == std::ssize(a) || same == std::ssize(b)) return a.size() < b.size();
  return a[same] < b[same];
}

// For all pages but the first `kept`. For twice as many at least, as pages come one by one.
void MakeRoomToCut(Layer& layer, size_t kept) {
  std::vector<PageNumber>& cut = layer.readers.back().cut;
  const size_t more = layer.pages.size() - kept;
  if (cut.capacity() - cut.size() >= more) return;
  cut.reserve(std::max(cut.size() + more, 2 * cut.size()));
}

// Those of `sessions`, sorted by their pages, that share a page of the one at `at`: the `index`-th.
// All layers of a session are forked alike, and cut alike but for the last ones, which may lose
// more. So where sessions share a page of any layer, they share that of the first one.
std::span<Session* const> WhoShare(std::span<Session* const> sessions, size_t at, size_t index) {
  const std::vector<PageNumber>& own = sessions[at]->layers[0].pages;
  if (index >= own.size()) return sessions.subspan(at, 1);
  const auto shares = [index, page = own[index]](const Session* each) {
    const std::vector<PageNumber>& pages = each->layers[0].pages;
    return index < pages.size() && pages[index] == page;
  };
  const auto self = sessions.begin() + static_cast<std::ptrdiff_t>(at);
  const auto first = std::partition_point(sessions.begin(), self, std::not_fn(shares));
  return {first, std::partition_point(self, sessions.end(), shares)};
}

// Whether all layers of a session have so many full pages, the first ones of another's, and nothing
// is appended to any.
bool IsBeginning(const Session& session, const Session& of, int64_t pages, int64_t rows) {
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const Layer& layer = session.layers[n];
    const std::vector<PageNumber>& other = of.layers[n].pages;
    if (layer.length != pages * rows || layer.append.hold != nullptr) return false;
    if (std::ssize(other) < pages || layer.pages[pages - 1] != other[pages - 1]) return false;
  }
  return true;
}

// The same pages of several sessions, to their ends.
struct Tails {
  std::span<Session* const> sessions;  // some may end before `begin`
  int64_t begin = 0;
};

// Those of `sessions`, sorted by their pages, that end within the `end` pages of the one at `at`,
// after `begin` or a later one, from which on nobody else has any of its pages.
Tails FindTails(std::span<Session* const> sessions, size_t at, int64_t begin, int64_t end,
                int64_t rows) {
  const Session& session = *sessions[at];
  // Who is farther away shares no more.
  const auto ends_within = [&](const Session& other) {
    const std::vector<PageNumber>& pages = other.layers[0].pages;
    const int64_t same = SamePages(pages, session.layers[0].pages);
    if (same <= begin) return false;
    if (same == std::ssize(pages) && IsBeginning(other, session, same, rows)) return true;
    begin = same;
    return false;
  };
  if (!ends_within(session)) return {{}, end};
  size_t first = at, last = at + 1;
  while (last < sessions.size() && ends_within(*sessions[last])) ++last;
  while (first > 0 && ends_within(*sessions[first - 1])) --first;
  return {sessions.subspan(first, last - first), begin};
}

}  // namespace

void SessionTable::DoomAppend(const Session& session, Layer& layer) {
  const auto [hold, n] = std::exchange(layer.append, {});
  if (hold == nullptr) return;
  hold->reserved_[n].doomed = true;
  LeavePages(session, layer, hold->OwnPages(n));
}

int64_t SessionTable::GainOf(std::span<Session* const> losers, size_t n, int64_t length,
                             From from) const {
  struct Page {
    int64_t losers = 0;
    bool read = false;
  };
  std::map<PageNumber, Page> pages;
  int64_t gain = 0;
  for (const Session* const loser : losers) {
    const Layer& layer = loser->layers[n];
    if (layer.length <= length) continue;
    Page& page = pages[layer.pages[length / options_.page_rows]];
    ++page.losers;
    page.read |= !layer.readers.empty();
    if (layer.append.hold == nullptr) continue;
    gain += std::ssize(layer.append.hold->OwnPages(layer.append.n)) * layer.layout.page_bytes;
  }
  const PagePool& pool = *pools_[losers[0]->device].pages;
  for (const auto& [number, page] : pages) {
    const int64_t leaving = pool.leaving(number);
    if (pool.references(number) - leaving > page.losers) continue;  // somebody else keeps it
    assert(from == From::kRunning || !page.read);
    // What comes back later is nothing to who needs it now.
    if (from == From::kRunning || leaving == 0) gain += pool.page_bytes(number);
  }
  return gain;
}

void SessionTable::EvictPages(std::span<Session* const> losers, size_t first_layer,
                              int64_t length) {
  const auto kept = static_cast<size_t>(length / options_.page_rows);
  for (Session* const loser : losers) {  // what may fail comes first
    for (Layer& layer : std::span(loser->layers).subspan(first_layer)) {
      if (layer.length > length && !layer.readers.empty()) MakeRoomToCut(layer, kept);
    }
  }
  for (Session* const loser : losers) {
    for (Layer& layer : std::span(loser->layers).subspan(first_layer)) {
      if (layer.length <= length) continue;
      DoomAppend(*loser, layer);
      Shorten(*loser, layer, length, layer.readers.empty() ? nullptr : &layer.readers.back().cut);
      layer.evicted_from = length;
      layer.append_id.clear();
    }
  }
}

bool SessionTable::MayLose(const Session& session, const Need& need, From from) const {
  if (session.device != need.session.device || session.pinned) return false;
  const bool own = session.tenant == need.session.tenant;
  // What is its own, and idle, has gone before what others run.
  if (from == (own ? From::kRunning : From::kOwn)) return false;
  if (session.in_use > 0) {
    if (from != From::kRunning) return false;
    const auto truncated = [&session](const Cut* cut) {
      return cut->fork == nullptr && cut->origin.get() == &session;
    };
    if (std::any_of(cuts_.begin(), cuts_.end(), truncated)) return false;
  }
  return own || MayLoseBytes(session.tenant, need) > 0;
}

void SessionTable::Evict(const Need& need, From from, const Missing& missing) {
  std::vector<Session*> by_use;
  for (const auto& [unused, each] : by_use_) {
    if (missing() <= 0) return;
    if (each->page_bytes == 0 || !MayLose(*each, need, from)) continue;
    Session* const alone = each;
    EvictTail({&alone, 1}, 0, need, from, missing);
    if (!each->layers[0].pages.empty()) by_use.push_back(each);
  }
  if (missing() <= 0) return;
  // What is left is shared: a page goes if all sessions that refer to it may lose it. Those that
  // share a page are neighbours if all are sorted by their pages, and stay so when all of them lose
  // it.
  std::vector<size_t> order(by_use.size()), place(by_use.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&by_use](size_t a, size_t b) {
    return PagesBefore(by_use[a]->layers[0].pages, by_use[b]->layers[0].pages);
  });
  std::vector<Session*> by_pages;
  for (const size_t n : order) {
    place[n] = by_pages.size();
    by_pages.push_back(by_use[n]);
  }
  std::set<PageNumber> kept;  // who ends with one of these cannot lose it either
  for (size_t n = 0; n < by_use.size() && missing() > 0; ++n) {
    const std::vector<PageNumber>& pages = by_use[n]->layers[0].pages;
    if (pages.empty() || kept.contains(pages.back())) continue;
    if (!MayLose(*by_use[n], need, from)) continue;
    EvictTail(by_pages, place[n], need, from, missing);
    if (!pages.empty()) kept.insert(pages.back());
  }
}

int64_t SessionTable::EvictAlike(std::span<Session* const> sessions, size_t at, From from,
                                 int64_t columns) {
  const Session& session = *sessions[at];
  const int64_t rows = options_.page_rows;
  const int64_t end = session.longest() / rows;
  const auto [losers, low] =
      FindTails(sessions, at, std::max<int64_t>(0, end - columns), end, rows);
  int64_t begin = low;
  std::vector<int64_t> ends(static_cast<size_t>(end - low + 1));  // how many end there
  for (const Session* const loser : losers) {
    const int64_t pages = std::ssize(loser->layers[0].pages);
    if (pages > low) ++ends[pages - low];
  }
  // Pages that somebody else keeps stay, as in GainOf.
  const PagePool& pool = *pools_[session.device].pages;
  for (const Layer& layer : session.layers) {
    int64_t sharing = 0;
    for (int64_t index = end - 1; index >= begin; --index) {
      sharing += ends[index + 1 - low];
      const int64_t leaving = pool.leaving(layer.pages[index]);
      const bool goes = pool.references(layer.pages[index]) - leaving <= sharing;
      if (!goes || (leaving > 0 && from != From::kRunning)) begin = index + 1;
    }
  }
  if (begin == end) return 0;
  std::vector<PageNumber> tail;
  tail.reserve(static_cast<size_t>(end - begin));
  for (Session* const loser : losers) {
    for (Layer& layer : loser->layers) {
      if (std::ssize(layer.pages) <= begin || layer.readers.empty()) continue;
      MakeRoomToCut(layer, static_cast<size_t>(begin));
    }
  }
  for (size_t n = 0; n < session.layers.size(); ++n) {  // nothing fails any more
    const std::vector<PageNumber>& own = session.layers[n].pages;
    tail.assign(own.begin() + begin, own.end());
    CutTails(losers, n, begin, tail, ends);
  }
  return end - begin;
}

void SessionTable::CutTails(std::span<Session* const> losers, size_t n, int64_t begin,
                            std::span<const PageNumber> tail, std::span<int64_t> ends) {
  const int64_t length = begin * options_.page_rows;
  std::fill(ends.begin(), ends.end(), 0);
  for (Session* const loser : losers) {
    Layer& layer = loser->layers[n];
    const int64_t cut = std::ssize(layer.pages) - begin;
    if (cut <= 0) continue;
    if (layer.readers.empty()) {
      ++ends[cut];
      layer.pages.resize(static_cast<size_t>(begin));
      layer.length = length;
      FitList(*loser, layer);
    } else {
      Shorten(*loser, layer, length, &layer.readers.back().cut);
    }
    layer.evicted_from = length;
    layer.append_id.clear();
  }
  const Session& any = *losers[0];
  const int64_t page_bytes = any.layers[n].layout.page_bytes;
  Pool& pool = pools_[any.device];
  int64_t times = 0;
  for (int64_t index = std::ssize(tail) - 1; index >= 0; --index) {
    times += ends[index + 1];
    if (times == 0) continue;
    const PagePool::Change change = pool.pages->DropReferences(tail[index], times);
    pool.tenant_bytes[any.tenant] -= change.freed * page_bytes;
    pool.tenant_coming[any.tenant] += change.coming * page_bytes;
  }
}

// Pages go from the end, of all layers alike, until it is enough, nothing is left, what is left
// would free nothing, or the tenant would have less than its share: then they go of the last layers
// alone, as many as it may lose. A page that several of `sessions` share goes from all of these,
// once it is the last one of each: so it goes with the one of them that was used last.
void SessionTable::EvictTail(std::span<Session* const> sessions, size_t at, const Need& need,
                             From from, const Missing& missing) {
  const Session& session = *sessions[at];
  const int64_t rows = options_.page_rows;
  int64_t column_bytes = 0;  // of a page of each layer
  bool other_size = false;
  for (const Layer& layer : session.layers) {
    column_bytes += layer.layout.page_bytes;
    other_size |= layer.layout.page_bytes != need.page_bytes;
  }
  int64_t evicted = 0, looks = 0;
  while (missing() > 0 && session.longest() > 0) {
    const int64_t left = (session.longest() - 1) / rows * rows;
    const auto losers = WhoShare(sessions, at, static_cast<size_t>(left / rows));
    const auto goes_on = [end = left + rows](const Session* each) { return each->longest() > end; };
    if (std::any_of(losers.begin(), losers.end(), goes_on)) break;
    const int64_t most = MayLoseBytes(session.tenant, need);
    size_t first = session.layers.size();
    int64_t gain = 0;
    for (; first > 0; --first) {
      const int64_t more = GainOf(losers, first - 1, left, from);
      if (more > most - gain) break;
      gain += more;
    }
    if (gain == 0) break;
    EvictPages(losers, first, left);
    evicted += gain;
    if (first > 0) continue;
    // Less is missing once the needy is within its share.
    const bool own = session.tenant == need.session.tenant;
    const int64_t beyond = BeyondShare(session.device, session.tenant) + need.bytes;
    const int64_t bytes = own && beyond > 0 ? beyond : MayLoseBytes(session.tenant, need);
    int64_t columns = std::max<int64_t>(0, std::min(missing(), bytes)) / column_bytes;
    // Of another size, all pages of a slab must go, which may be few: not many more than that go.
    if (other_size) columns = std::min(columns, int64_t{1} << std::min<int64_t>(looks++, 32));
    evicted += column_bytes * EvictAlike(sessions, at, from, columns);
  }
  if (evicted == 0) return;
  ++(session.tenant == need.session.tenant ? stats_.evictions_own : stats_.evictions_others);
  stats_.evicted_bytes += evicted;
  const double idle = std::chrono::duration<double>(clock_.Now() - session.last_used).count();
  stats_.evicted_idle_seconds += idle;
  const auto* const bound =
      std::lower_bound(kIdleBoundsSeconds.begin(), kIdleBoundsSeconds.end(), idle);
  ++stats_.evictions_by_idle[bound - kIdleBoundsSeconds.begin()];
}

}  // namespace attend
