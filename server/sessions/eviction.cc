// SPDX-License-Identifier: Apache-2.0
//
// How sessions come to pages and lose them.

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/sessions/session_table.h"

namespace attend {
namespace {

// An order in which lists that begin with the same pages are neighbours. Whoever shares a page
// shares all before it, so that few are looked at.
bool PagesBefore(std::span<const PageNumber> a, std::span<const PageNumber> b) {
  size_t same = 0, end = std::min(a.size(), b.size());
  while (same < end) {
    const size_t middle = same + (end - same) / 2;
    if (a[middle] == b[middle]) {
      same = middle + 1;
    } else {
      end = middle;
    }
  }
  if (same == a.size() || same == b.size()) return a.size() < b.size();
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

}  // namespace

void SessionTable::DropPages(const Session& session, const Layer& layer,
                             std::span<const PageNumber> pages, bool leaving) {
  Pool& pool = pools_[session.device];
  const PagePool::Change change = pool.pages->DropReferences(pages, leaving);
  pool.tenant_bytes[session.tenant] -= change.freed * layer.layout.page_bytes;
  pool.tenant_coming[session.tenant] += change.coming * layer.layout.page_bytes;
}

void SessionTable::LeavePages(const Session& session, const Layer& layer,
                              std::span<const PageNumber> pages) {
  Pool& pool = pools_[session.device];
  pool.tenant_coming[session.tenant] += pool.pages->Leave(pages) * layer.layout.page_bytes;
}

void SessionTable::Shorten(Session& session, Layer& layer, int64_t length,
                           std::vector<PageNumber>* cut) {
  const int64_t rows = options_.page_rows;
  const auto keep = static_cast<size_t>((length + rows - 1) / rows);
  const auto tail = std::span(layer.pages).subspan(keep);
  if (cut != nullptr) {
    cut->insert(cut->end(), tail.begin(), tail.end());
    if (!layer.readers.empty()) LeavePages(session, layer, tail);
  } else {
    assert(layer.readers.empty());
    DropPages(session, layer, tail, layer.leaving);
  }
  layer.pages.resize(keep);
  layer.length = length;
  FitList(session, layer);
}

Status SessionTable::TakePages(const Session& session, int64_t page_bytes, int64_t count,
                               std::vector<PageNumber>& pages, CacheRefusal* refusal) {
  if (count == 0) return Status();
  Pool& pool = pools_[session.device];
  const Need need{session, count * page_bytes};
  const int64_t claims = ClaimsOfOthers(need);
  // Once enough of its own has gone, it is within its share.
  const auto kept = [&]() ATTEND_REQUIRES(mutex_) { return WithinShare(need) ? 0 : claims; };
  const auto left = [&]() ATTEND_REQUIRES(mutex_) {
    return pool.pages->Room(page_bytes) * page_bytes - kept();
  };
  const auto enough = [&]() ATTEND_REQUIRES(mutex_) { return left() >= need.bytes; };
  const auto coming = [&]() ATTEND_REQUIRES(mutex_) {
    return left() + ComingBytes(session.device) >= need.bytes + claims;
  };
  while (!enough() && ExpireLocked()) {
  }
  // Who goes beyond its share, and would even without its idle sessions, takes nothing from anybody
  // if that would not be enough.
  const bool fits = count <= pool.pages->stats().total_bytes / page_bytes;
  const auto may_take = [&]()
                            ATTEND_REQUIRES(mutex_) { return fits && EnoughToEvict(need, claims); };
  bool asks_again = false;
  if (enough() || may_take()) {
    ATTEND_RETURN_IF_ERROR(KeepLimit(need, refusal));
    if (!enough() && may_take()) Evict(need, From::kIdle, enough);
    // What is its own by right it gets now, or when running requests have ended.
    if (!enough() && WithinShare(need)) {
      GiveWay(need, enough);
      Evict(need, From::kIdle, enough);
    }
    asks_again = !enough() && WithinShare(need);
    if (asks_again) {
      Evict(need, From::kRunning, coming);
      Claim(need);
    }
  }
  if (!enough()) {
    if (refusal != nullptr) refusal->missing_bytes = need.bytes - left();
    const Status lacking = pool.pages->Lacking(page_bytes, count, kept());
    return asks_again ? ResourceExhausted(lacking.message() + "; room is being made: ask again")
                      : lacking;
  }
  ATTEND_RETURN_IF_ERROR(pool.pages->Take(page_bytes, count, pages));
  pool.tenant_bytes[session.tenant] += need.bytes;
  int64_t& claim = pool.claims[session.tenant].bytes;
  claim = std::max<int64_t>(0, claim - need.bytes);
  return Status();
}

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

// A session that they read, and pages that they have taken, would be kept from others for as long
// as a client likes to take to send its bytes. Those requests may still find all that they need
// when their bytes have come.
void SessionTable::GiveWay(const Need& need, const Enough& enough) {
  for (auto next = holds_.begin(); next != holds_.end() && !enough();) {
    CacheHold& hold = **next++;
    const bool others = hold.device_ == need.session.device && hold.tenant_ != need.session.tenant;
    if (!others || !hold.provisional_ || hold.sessions_.empty()) continue;
    if (BeyondShare(hold.device_, hold.tenant_) <= 0) continue;
    LetGo(hold);
    ++stats_.gave_way;
  }
}

bool SessionTable::MayLose(const Session& session, const Need& need, From from) const {
  if (session.device != need.session.device || session.pinned) return false;
  const bool own = session.tenant == need.session.tenant;
  if (from == From::kOwn && !own) return false;
  if (session.in_use > 0) {
    if (from != From::kRunning || own) return false;
    const auto truncated = [&session](const Cut* cut) {
      return cut->fork == nullptr && cut->origin.get() == &session;
    };
    if (std::any_of(cuts_.begin(), cuts_.end(), truncated)) return false;
  }
  return own || MayLoseBytes(session.tenant, need) > 0;
}

// An upper bound: pages that sessions share are counted for each of them. Looks no further than it
// has to.
bool SessionTable::EnoughToEvict(const Need& need, int64_t claims) const {
  const PagePool::Stats& stats = pools_[need.session.device].pages->stats();
  int64_t found = stats.total_bytes - stats.used_bytes;
  int64_t beyond = BeyondShare(need.session.device, need.session.tenant) + need.bytes;
  const auto enough = [&] { return beyond <= 0 || found >= need.bytes + claims; };
  std::vector<int64_t> left(options_.tenant_weights.size());
  for (size_t tenant = 0; tenant < left.size(); ++tenant) {
    left[tenant] = MayLoseBytes(static_cast<int>(tenant), need);
  }
  for (const auto& [unused, each] : by_use_) {
    if (enough()) return true;
    if (!MayLose(*each, need, From::kIdle)) continue;
    const int64_t loses = std::min(each->page_bytes(), left[each->tenant]);
    left[each->tenant] -= loses;
    found += loses;
    if (each->tenant == need.session.tenant) beyond -= loses;
  }
  return enough();
}

void SessionTable::Evict(const Need& need, From from, const Enough& enough) {
  std::vector<Session*> by_use;
  for (const auto& [unused, each] : by_use_) {
    if (enough()) return;
    if (!MayLose(*each, need, from)) continue;
    Session* const alone = each;
    EvictTail({&alone, 1}, 0, need, from, enough);
    if (!each->layers[0].pages.empty()) by_use.push_back(each);
  }
  if (enough()) return;
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
  for (size_t n = 0; n < by_use.size() && !enough(); ++n) {
    const std::vector<PageNumber>& pages = by_use[n]->layers[0].pages;
    if (pages.empty() || kept.contains(pages.back())) continue;
    if (!MayLose(*by_use[n], need, from)) continue;
    EvictTail(by_pages, place[n], need, from, enough);
    if (!pages.empty()) kept.insert(pages.back());
  }
}

// Pages go from the end, of all layers alike, until it is enough, nothing is left, what is left
// would free nothing, or the tenant would have less than its share: then they go of the last layers
// alone, as many as it may lose. A page that several of `sessions` share goes from all of these,
// once it is the last one of each: so it goes with the one of them that was used last.
void SessionTable::EvictTail(std::span<Session* const> sessions, size_t at, const Need& need,
                             From from, const Enough& enough) {
  const Session& session = *sessions[at];
  const int64_t rows = options_.page_rows;
  int64_t evicted = 0;
  while (!enough() && session.longest() > 0) {
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
