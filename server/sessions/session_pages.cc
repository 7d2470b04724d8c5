// SPDX-License-Identifier: Apache-2.0
//
// How sessions come to pages, and drop them.

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "server/sessions/session_table.h"

namespace attend {

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
  const Need need{session, page_bytes, count * page_bytes};
  const int64_t claims = ClaimsOfOthers(need);
  // Once enough of its own has gone, it is within its share.
  const auto kept = [&]() ATTEND_REQUIRES(mutex_) { return WithinShare(need) ? 0 : claims; };
  const auto left = [&]() ATTEND_REQUIRES(mutex_) {
    return pool.pages->Room(page_bytes) * page_bytes - kept();
  };
  const auto missing = [&]() ATTEND_REQUIRES(mutex_) { return need.bytes - left(); };
  const auto enough = [&]() ATTEND_REQUIRES(mutex_) { return missing() <= 0; };
  const auto missing_later = [&]() ATTEND_REQUIRES(mutex_) {
    return need.bytes + claims - left() - ComingBytes(session.device);
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
    if (!enough() && may_take()) Evict(need, From::kIdle, missing);
    // What is its own by right it gets now, or when running requests have ended.
    if (!enough() && WithinShare(need)) {
      GiveWay(need, missing);
      Evict(need, From::kIdle, missing);
    }
    asks_again = !enough() && WithinShare(need);
    if (asks_again) {
      Evict(need, From::kRunning, missing_later);
      Claim(need);
    }
  }
  if (!enough()) {
    if (refusal != nullptr) refusal->missing_bytes = missing();
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

// A session that they read, and pages that they have taken, would be kept from others for as long
// as a client likes to take to send its bytes. Those requests may still find all that they need
// when their bytes have come.
void SessionTable::GiveWay(const Need& need, const Missing& missing) {
  for (auto next = holds_.begin(); next != holds_.end() && missing() > 0;) {
    CacheHold& hold = **next++;
    const bool others = hold.device_ == need.session.device && hold.tenant_ != need.session.tenant;
    if (!others || !hold.provisional_ || hold.sessions_.empty()) continue;
    if (BeyondShare(hold.device_, hold.tenant_) <= 0) continue;
    LetGo(hold);
    ++stats_.gave_way;
  }
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
    const int64_t loses = std::min(each->page_bytes, left[each->tenant]);
    left[each->tenant] -= loses;
    found += loses;
    if (each->tenant == need.session.tenant) beyond -= loses;
  }
  return enough();
}

}  // namespace attend
