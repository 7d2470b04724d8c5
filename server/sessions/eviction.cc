// SPDX-License-Identifier: Apache-2.0
//
// How sessions come to pages and lose them.

#include <algorithm>
#include <chrono>
#include <numeric>

#include "server/sessions/session_table.h"

namespace attend {

void SessionTable::DropPages(const Session& session, const Layer& layer,
                             std::span<const PageNumber> pages) {
  Pool& pool = pools_[session.device];
  pool.tenant_bytes[session.tenant] -= pool.pages->DropReferences(pages) * layer.layout.page_bytes;
}

void SessionTable::Shorten(Session& session, Layer& layer, int64_t length) {
  const int64_t rows = options_.page_rows;
  const auto keep = static_cast<size_t>((length + rows - 1) / rows);
  DropPages(session, layer, std::span(layer.pages).subspan(keep));
  layer.pages.resize(keep);
  layer.length = length;
}

Status SessionTable::TakePages(const Session& session, int64_t page_bytes, int64_t count,
                               std::vector<PageNumber>& pages) {
  Pool& pool = pools_[session.device];
  if (pool.pages->Room(page_bytes) < count) {
    std::vector<Session*> victims;
    for (const auto& [unused, each] : by_use_) {
      if (MayEvict(*each, session)) victims.push_back(each);
    }
    for (Session* const victim : victims) {
      if (pool.pages->Room(page_bytes) >= count) break;
      if (MayEvict(*victim, session)) EvictTail(*victim, session, page_bytes, count);
    }
  }
  ATTEND_RETURN_IF_ERROR(pool.pages->Take(page_bytes, count, pages));
  pool.tenant_bytes[session.tenant] += count * page_bytes;
  return Status();
}

bool SessionTable::MayEvict(const Session& session, const Session& needy) const {
  if (session.device != needy.device || session.in_use > 0 || session.pinned) return false;
  if (std::all_of(session.layers.begin(), session.layers.end(),
                  [](const Layer& layer) { return layer.pages.empty(); })) {
    return false;
  }
  if (session.tenant == needy.tenant) return true;
  // Another tenant's only if it has more than its share.
  const Pool& pool = pools_[session.device];
  const auto weights =
      std::accumulate(options_.tenant_weights.begin(), options_.tenant_weights.end(), int64_t{0});
  const double share = static_cast<double>(options_.tenant_weights[session.tenant]) /
                       static_cast<double>(weights) *
                       static_cast<double>(pool.pages->stats().total_bytes);
  return static_cast<double>(pool.tenant_bytes[session.tenant]) > share;
}

// Pages go from the end, of all layers alike, until there is room, nothing is left, or what is left
// would free nothing, as others refer to it.
void SessionTable::EvictTail(Session& session, const Session& needy, int64_t page_bytes,
                             int64_t count) {
  const Pool& pool = pools_[session.device];
  const int64_t before = pool.pages->stats().used_bytes;
  const int64_t rows = options_.page_rows;
  while (pool.pages->Room(page_bytes) < count) {
    int64_t longest = 0;
    for (const Layer& layer : session.layers) longest = std::max(longest, layer.length);
    if (longest == 0) break;
    const int64_t left = (longest - 1) / rows * rows;
    const auto frees = [&](const Layer& layer) {
      return layer.length > left && pool.pages->references(layer.pages[left / rows]) == 1;
    };
    if (std::none_of(session.layers.begin(), session.layers.end(), frees)) break;
    for (Layer& layer : session.layers) {
      if (layer.length <= left) continue;
      Shorten(session, layer, left);
      layer.evicted_from = left;
      layer.append_id.clear();
    }
  }
  ++(session.tenant == needy.tenant ? stats_.evictions_own : stats_.evictions_others);
  stats_.evicted_bytes += before - pool.pages->stats().used_bytes;
  stats_.evicted_idle_seconds +=
      std::chrono::duration<double>(clock_.Now() - session.last_used).count();
}

}  // namespace attend
