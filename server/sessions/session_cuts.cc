// SPDX-License-Identifier: Apache-2.0
//
// Forks and truncations. Both cut a sequence after some tokens. The page at the cut will be written
// to, so a session that shares it needs a copy. The copies are made without the table's lock, in
// three steps: take pages, copy, finish. In between, the origin's leaf is pinned, so the source
// pages do not change. A session that is being truncated cannot be appended to (`changing`), but
// its pages may be read and become shared in the meantime. So if one of its cut pages is copied,
// all are.

#include <algorithm>
#include <cassert>
#include <new>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {

void SessionTable::BeginCut(const SessionRef& origin, Cut& cut) {
  cut.pages.reserve(origin->layers.size());
  cuts_.insert(&cut);
  cut.arena = devices_[origin->device].arena;
  cut.origin = origin;
  cut.leaf = origin->leaf;
  TreeOf(*origin).Pin(*cut.leaf);
}

void SessionTable::EndCut(Cut& cut) {
  TreeOf(*cut.origin).Unpin(*cut.leaf);
  cuts_.erase(&cut);
}

// Copies only the rows before the cut: an append may be writing the others.
void SessionTable::PlanCopies(int64_t length, Cut& cut) {
  const PageTree& tree = TreeOf(*cut.origin);
  for (const CutPage& page : cut.pages) {
    const Layer& of = cut.origin->layers[page.layer];
    char* const source = tree.data(page.from);
    char* const copy = tree.data(page.to);
    // On a device fewer pieces are faster, and rows after the cut are never read.
    if (!cut.arena->on_host()) {
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
    // Shared pages must be the same in all layers (page_tree.h).
    return Status(Code::kFailedPrecondition,
                  "length is not given, but the session's layers have " + std::to_string(whole) +
                      " to " + std::to_string(origin.longest()) + " tokens: give one in [0, " +
                      std::to_string(whole) + "]");
  }
  const int64_t kept = length.value_or(whole);
  if (kept < 0 || kept > whole) {
    return Status(Code::kOutOfRange, OutOfBounds("length", kept, 0, whole));
  }
  cut.fork->tenant = origin.tenant;
  cut.fork->device = origin.device;
  cut.fork->lease = origin.lease;
  cut.fork->pinned = origin.pinned;
  ATTEND_RETURN_IF_ERROR(TakePlace(*cut.fork));
  ATTEND_RETURN_IF_ERROR(CheckRoom(tenant, std::ssize(origin.layers)));
  BeginCut(*found, cut);  // in use, so that it is not evicted for its own fork
  return ForkLayers(kept, cut, refusal);
}

// Takes all pages of one size at once.
Status SessionTable::TakeCopies(const CopyLayers& layers, int64_t length, Cut& cut,
                                CacheRefusal* refusal) {
  const PageTree& tree = TreeOf(*cut.origin);
  const auto charge = [&](const auto& layer) {
    return tree.Charge(layer.first) * std::ssize(layer.second);
  };
  int64_t later_bytes = 0;
  for (const auto& layer : layers) later_bytes += charge(layer);
  std::vector<PageNumber> taken;
  for (const auto& layer : layers) {
    const auto& [page_bytes, numbers] = layer;
    later_bytes -= charge(layer);
    taken.clear();
    ATTEND_RETURN_IF_ERROR(
        TakePages(*cut.origin, page_bytes, std::ssize(numbers), later_bytes, taken, refusal));
    for (size_t n = 0; n < numbers.size(); ++n) {
      const PageNumber from = PageTree::PageAt(*cut.leaf, numbers[n], length / options_.page_rows);
      cut.pages.push_back({numbers[n], from, taken[n]});  // capacity was reserved
    }
  }
  PlanCopies(length, cut);
  return Status();
}

// Full pages are shared; the page at the cut is copied.
Status SessionTable::ForkLayers(int64_t length, Cut& cut, CacheRefusal* refusal) {
  const Session& origin = *cut.origin;
  Session& fork = *cut.fork;
  const int64_t rows = options_.page_rows;
  PageTree& tree = TreeOf(origin);
  fork.layers.reserve(origin.layers.size());
  CopyLayers copied;
  for (size_t n = 0; n < origin.layers.size(); ++n) {
    const Layer& layer = origin.layers[n];
    fork.layers.push_back({.shape = layer.shape, .layout = layer.layout, .length = length});
    if (length % rows != 0) copied[layer.layout.page_bytes].push_back(n);
  }
  fork.leaf = tree.Fork(*cut.leaf, length / rows, fork.pinned, clock_.Now());
  for (const auto& [unused, numbers] : copied) {
    for (const size_t n : numbers) PageTree::Reserve(*fork.leaf, n, 1);
  }
  return TakeCopies(copied, length, cut, refusal);
}

// If a step here throws, the next call sees the state unchanged.
Result<SessionInfo> SessionTable::EndFork(Cut& cut, Status status) {
  const MutexLock lock(mutex_);
  if (cut.origin == nullptr) return status;
  Session& fork = *cut.fork;
  PageTree& tree = TreeOf(fork);
  for (; !cut.pages.empty(); cut.pages.pop_back()) {
    const CutPage& page = cut.pages.back();
    if (status.ok()) {
      tree.Append(*fork.leaf, page.layer, {&page.to, 1});
    } else {
      tree.Give(fork.tenant, {&page.to, 1});
    }
  }
  SessionInfo info;
  if (status.ok()) status = CheckRoom(fork.tenant, std::ssize(fork.layers));
  if (status.ok()) info = Insert(cut.fork);
  if (!status.ok() && fork.leaf != nullptr) tree.Leave(*std::exchange(fork.leaf, nullptr));
  EndCut(cut);
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
      info = InfoOf(*cut.origin);  // while the session can still be left unchanged
      status = CopyShared(length, cut, refusal);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
    }
    assert(ConsistentLocked());
    // If nothing is copied, finish under the same lock: a page could become shared in between.
    if (!status.ok() || cut.pieces.empty())
      return EndTruncate(length, cut, std::move(status), info);
  }
  try {
    status = cut.arena->Copy(cut.pieces);
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  const MutexLock lock(mutex_);
  return EndTruncate(length, cut, std::move(status), info);
}

// If OK, EndTruncate must follow.
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
  BeginCut(*found, cut);
  Use(session, 1);
  for (Layer& layer : session.layers) layer.changing = true;
  return Status();
}

// Takes copies of the cut pages if they are shared or being read; the other readers keep the
// originals.
Status SessionTable::CopyShared(int64_t length, Cut& cut, CacheRefusal* refusal) {
  const Session& session = *cut.origin;
  const int64_t rows = options_.page_rows;
  const PageTree::Branch& leaf = *cut.leaf;
  const bool read = leaf.pins > 1 || leaf.children > 0;  // one pin is this truncation's own
  if (length % rows == 0 || (!read && length / rows >= leaf.begin)) return Status();
  CopyLayers cuts;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const Layer& layer = session.layers[n];
    if (length < layer.length) cuts[layer.layout.page_bytes].push_back(n);
  }
  return TakeCopies(cuts, length, cut, refusal);
}

// If the cut page was copied, the tree keeps only the pages before it.
void SessionTable::CutLayers(int64_t length, Cut& cut) {
  Session& session = *cut.origin;
  PageTree& tree = TreeOf(session);
  const int64_t rows = options_.page_rows;
  const int64_t left = (length + (cut.pages.empty() ? rows - 1 : 0)) / rows;
  std::vector<int64_t> kept(session.layers.size());
  for (size_t n = 0; n < kept.size(); ++n) {
    const int64_t pages = PageTree::PagesOf(*session.leaf, n);
    kept[n] = length < session.layers[n].length ? left : pages;
  }
  session.leaf = tree.Cut(*session.leaf, kept, 1);
  for (; !cut.pages.empty(); cut.pages.pop_back()) {
    const CutPage& page = cut.pages.back();
    tree.Append(*session.leaf, page.layer, {&page.to, 1});
  }
  for (size_t n = 0; n < kept.size(); ++n) {
    Layer& layer = session.layers[n];
    if (length >= layer.length) continue;
    PageTree::Fit(*session.leaf, n);
    layer.length = length;
    layer.append_id.clear();
    layer.evicted_from = -1;
  }
}

Result<SessionInfo> SessionTable::EndTruncate(int64_t length, Cut& cut, Status status,
                                              SessionInfo& info) {
  Session& session = *cut.origin;
  PageTree& tree = TreeOf(session);
  for (Layer& layer : session.layers) layer.changing = false;
  EndCut(cut);  // pages that nothing else reads may be freed
  if (status.ok() && session.leaf == nullptr) {
    status = Status(Code::kNotFound, "session: freed in the meantime");
  }
  if (status.ok()) {
    try {
      if (length < session.longest()) CutLayers(length, cut);
      Touch(session);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
    }
  }
  for (; !cut.pages.empty(); cut.pages.pop_back()) {
    tree.Give(session.tenant, {&cut.pages.back().to, 1});
  }
  Use(session, -1);
  assert(ConsistentLocked());
  if (!status.ok()) return status;
  Update(session, info);
  return std::move(info);
}

}  // namespace attend
