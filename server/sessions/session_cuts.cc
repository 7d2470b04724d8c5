// SPDX-License-Identifier: Apache-2.0
//
// Forks and truncations. Both cut a sequence after some tokens. The page that the cut goes through
// will be written to, so a session that shares it needs a copy. The copies are made while the table
// is not locked, in three steps: take pages, copy, finish. Meanwhile the pages that a fork copies
// have a reference more. A session that is truncated keeps its pages meanwhile, even if it is
// freed. No layer of it may be appended to (`changing`), but its pages may be read, and come to be
// shared: so if one of its pages is copied, all that it cuts are.

#include <algorithm>
#include <cassert>
#include <new>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {

void SessionTable::AddToCut(size_t layer, PageNumber to, int64_t length, Cut& cut) {
  PagePool& pool = *pools_[cut.origin->device].pages;
  const PageNumber from = cut.origin->layers[layer].pages[length / options_.page_rows];
  cut.pages.push_back({layer, from, to});  // for which Begin has made room: this cannot fail
  if (cut.fork == nullptr) return;
  pool.AddReferences({&from, 1});
  cut.fork->layers[layer].pages.push_back(to);  // the same
}

// Rows that were there before the cut: an append may be writing the page's others.
void SessionTable::PlanCopies(int64_t length, Cut& cut) {
  const PagePool& pool = *pools_[cut.origin->device].pages;
  for (const CutPage& page : cut.pages) {
    const Layer& of = cut.origin->layers[page.layer];
    char* const source = pool.data(page.from);
    char* const copy = pool.data(page.to);
    if (!cut.arena->on_host()) {  // fewer pieces are faster there, and what is beyond is not read
      cut.pieces.push_back({source, copy, of.layout.page_bytes});
      continue;
    }
    const int64_t size = DTypeBytes(of.shape.dtype);
    for (const auto& [begin, dim] :
         {std::pair{int64_t{0}, of.shape.dim}, std::pair{of.layout.k_bytes, of.shape.dim_v}}) {
      for (int64_t head = 0; head < of.shape.heads_kv; ++head) {
        const int64_t at = begin + head * options_.page_rows * dim * size;
        cut.pieces.push_back({source + at, copy + at, length % options_.page_rows * dim * size});
      }
    }
  }
}

void SessionTable::DropCut(Cut& cut) {
  for (; !cut.pages.empty(); cut.pages.pop_back()) {
    const CutPage& page = cut.pages.back();
    if (cut.fork != nullptr)
      DropPages(*cut.origin, cut.origin->layers[page.layer], {&page.from, 1});
  }
}

Result<SessionInfo> SessionTable::Fork(int tenant, const std::string& id,
                                       std::optional<int64_t> length, CacheRefusal* refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Result<std::string> fork_id = tokens_();
  if (!fork_id.ok()) return fork_id.status();
  Cut cut;
  cut.fork = std::make_shared<Session>();
  cut.fork->id = *std::move(fork_id);
  Status status;
  try {
    status = BeginFork(tenant, id, length, cut, refusal);
    if (status.ok()) status = cut.arena->Copy(cut.pieces);
    return EndFork(cut, std::move(status));
  } catch (const std::bad_alloc&) {
    return EndFork(cut, OutOfMemory());
  }
}

Status SessionTable::BeginFork(int tenant, const std::string& id, std::optional<int64_t> length,
                               Cut& cut, CacheRefusal* refusal) {
  const MutexLock lock(mutex_);
  ExpireLocked();
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  Session& origin = **found;
  const int64_t whole = origin.length();
  if (!length && origin.longest() > whole) {
    // Sessions that share a page of any layer share the first layer's (eviction.cc), so a fork has
    // one length.
    return Status(Code::kFailedPrecondition,
                  "length is not given, but the session's layers have " + std::to_string(whole) +
                      " to " + std::to_string(origin.longest()) + " tokens: give one in [0, " +
                      std::to_string(whole) + "]");
  }
  const int64_t kept = length.value_or(whole);
  if (kept < 0 || kept > whole) {
    return Status(Code::kOutOfRange, OutOfBounds("length", kept, 0, whole));
  }
  const int64_t pages = (kept + options_.page_rows - 1) / options_.page_rows;
  const auto layers = std::ssize(origin.layers);
  cut.pages.reserve(origin.layers.size());
  cut.fork->tenant = origin.tenant;
  ATTEND_RETURN_IF_ERROR(TakePlace(*cut.fork, refusal));
  const TableUse more = {1, FixedBytes(layers) + layers * pages * kPageEntryBytes};
  ATTEND_RETURN_IF_ERROR(MakeRoom(tenant, more, origin.pinned ? more : TableUse()));
  cut.origin = *found;
  cut.arena = pools_[origin.device].arena;
  cut.fork->device = origin.device;
  cut.fork->lease = origin.lease;
  cut.fork->pinned = origin.pinned;
  cuts_.insert(&cut);
  const InUse in_use(origin);  // so that it is not evicted for its own fork
  return ForkLayers(kept, cut, refusal);
}

// Of each size all at once, so that who was refused is kept room for all of them. If there is no
// memory, what is missing is told for the sizes that follow too.
Status SessionTable::TakeCopies(const Session& session, const CopyLayers& layers, int64_t length,
                                Cut& cut, CacheRefusal* refusal) {
  std::vector<PageNumber> taken;
  for (auto next = layers.begin(); next != layers.end(); ++next) {
    const auto& [page_bytes, numbers] = *next;
    const auto count = std::ssize(numbers);
    ATTEND_RETURN_IF_ERROR(CheckPinned(session, session.pinned ? count * page_bytes : 0));
    taken.clear();
    const Status status = TakePages(session, page_bytes, count, taken, refusal);
    if (!status.ok() && refusal != nullptr && refusal->missing_bytes > 0) {
      for (auto later = std::next(next); later != layers.end(); ++later) {
        refusal->missing_bytes += later->first * std::ssize(later->second);
      }
    }
    ATTEND_RETURN_IF_ERROR(status);
    for (size_t n = 0; n < numbers.size(); ++n) AddToCut(numbers[n], taken[n], length, cut);
  }
  PlanCopies(length, cut);
  return Status();
}

// Full pages are shared.
Status SessionTable::ForkLayers(int64_t length, Cut& cut, CacheRefusal* refusal) {
  const Session& origin = *cut.origin;
  Session& fork = *cut.fork;
  const int64_t rows = options_.page_rows;
  CopyLayers copied;
  for (size_t n = 0; n < origin.layers.size(); ++n) {
    const Layer& layer = origin.layers[n];
    Layer& mine = fork.layers.emplace_back(
        Layer{.shape = layer.shape, .layout = layer.layout, .length = length});
    mine.pages.reserve(static_cast<size_t>((length + rows - 1) / rows));
    mine.pages.assign(layer.pages.begin(), layer.pages.begin() + length / rows);
    pools_[origin.device].pages->AddReferences(mine.pages);
    if (length % rows != 0) copied[layer.layout.page_bytes].push_back(n);
  }
  const Status status = TakeCopies(fork, copied, length, cut, refusal);
  for (Layer& layer : fork.layers) CountList(fork, layer);
  return status;
}

// What throws here has changed nothing that the next call does not see.
Result<SessionInfo> SessionTable::EndFork(Cut& cut, Status status) {
  const MutexLock lock(mutex_);
  DropCut(cut);
  if (status.ok()) {
    const TableUse more = {1, FixedBytes(std::ssize(cut.fork->layers))};
    status = MakeRoom(cut.fork->tenant, more, cut.fork->pinned ? more : TableUse());
  }
  SessionInfo info;
  if (status.ok()) {
    info = Insert(cut.fork);
  } else {
    for (Layer& layer : cut.fork->layers) Shorten(*cut.fork, layer, 0);
  }
  cuts_.erase(&cut);
  assert(ConsistentLocked());
  if (!status.ok()) return status;
  return info;
}

Result<SessionInfo> SessionTable::Truncate(int tenant, const std::string& id, int64_t length,
                                           CacheRefusal* refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Cut cut;
  SessionInfo info;
  Status status;
  {
    const MutexLock lock(mutex_);
    ATTEND_RETURN_IF_ERROR(BeginTruncate(tenant, id, length, cut));
    try {
      info = InfoOf(*cut.origin);  // while the session can still be left as it is
      status = CopyShared(length, cut, refusal);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
    }
    assert(ConsistentLocked());
    // At once, if nothing is copied: a page may come to be shared while the table is not locked.
    if (!status.ok() || cut.pieces.empty()) return EndTruncate(length, cut, status, info);
  }
  try {
    status = cut.arena->Copy(cut.pieces);
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  const MutexLock lock(mutex_);
  return EndTruncate(length, cut, status, info);
}

// If it is OK, EndTruncate must follow.
Status SessionTable::BeginTruncate(int tenant, const std::string& id, int64_t length, Cut& cut) {
  ExpireLocked();
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  Session& session = **found;
  const int64_t longest = session.longest();
  if (length < 0 || length > longest) {
    return Status(Code::kOutOfRange, OutOfBounds("length", length, 0, longest));
  }
  for (const Layer& layer : session.layers) {
    if (layer.changing) return Unavailable("session: an append or a truncation is under way");
  }
  cut.pages.reserve(session.layers.size());
  for (const Layer& layer : session.layers) {
    std::vector<PageNumber>& room = cut.room.emplace_back(1).front().cut;
    if (length >= layer.length) continue;
    const int64_t kept = (length + options_.page_rows - 1) / options_.page_rows;
    room.reserve(layer.pages.size() - kept + 1);
  }
  cut.arena = pools_[session.device].arena;
  cut.origin = *found;
  cuts_.insert(&cut);
  ++session.in_use;
  for (Layer& layer : session.layers) layer.changing = true;
  return Status();
}

// Others that read the pages keep them.
Status SessionTable::CopyShared(int64_t length, Cut& cut, CacheRefusal* refusal) {
  const Session& session = *cut.origin;
  const int64_t rows = options_.page_rows;
  if (length % rows == 0) return Status();
  const PagePool& pool = *pools_[session.device].pages;
  bool shared = false;
  CopyLayers cuts;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const Layer& layer = session.layers[n];
    if (length >= layer.length) continue;
    cuts[layer.layout.page_bytes].push_back(n);
    shared |= !layer.readers.empty() || pool.references(layer.pages[length / rows]) > 1;
  }
  return shared ? TakeCopies(session, cuts, length, cut, refusal) : Status();
}

Result<SessionInfo> SessionTable::EndTruncate(int64_t length, Cut& cut, const Status& status,
                                              SessionInfo& info) {
  Session& session = *cut.origin;
  const bool gone = !sessions_.contains(session.id);
  const bool cuts = status.ok() && !gone;
  --session.in_use;
  for (Layer& layer : session.layers) layer.changing = false;
  for (CutPage& page : cut.pages) {
    Layer& layer = session.layers[page.layer];
    if (cuts) {
      std::swap(layer.pages[length / options_.page_rows], page.to);
      cut.room[page.layer].front().cut.push_back(page.to);
      if (!layer.readers.empty()) LeavePages(session, layer, {&page.to, 1});
    } else {
      DropPages(session, layer, {&page.to, 1});
    }
  }
  DropCut(cut);
  cuts_.erase(&cut);
  for (size_t n = 0; n < session.layers.size() && cuts; ++n) {
    Layer& layer = session.layers[n];
    if (length >= layer.length) continue;
    std::list<Readers>& room = cut.room[n];
    Shorten(session, layer, length, &room.front().cut);
    if (layer.readers.empty()) {
      DropPages(session, layer, room.front().cut);
    } else if (layer.readers.back().cut.empty()) {
      layer.readers.back().cut.swap(room.front().cut);
    } else {
      layer.readers.splice(layer.readers.end(), room);
    }
    layer.append_id.clear();
    layer.evicted_from = -1;
  }
  if (cuts) Touch(session);
  for (Layer& layer : session.layers) {
    if (gone && layer.readers.empty()) Shorten(session, layer, 0);
  }
  assert(ConsistentLocked());
  if (!status.ok()) return status;
  if (gone) return Status(Code::kNotFound, "session: it has been freed");
  Update(session, info);
  return std::move(info);
}

}  // namespace attend
