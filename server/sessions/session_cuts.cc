// SPDX-License-Identifier: Apache-2.0
//
// Forks, and truncations after which tokens of a draft may follow (session_drafts.cc). All cut a
// sequence after some tokens. The page at the cut will be written to, so a session that shares it
// needs a copy. The copies are made without the table's lock, in
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

namespace {

// Pieces of one copy, so that those of many rows take little memory.
constexpr size_t kPiecesMax = 1 << 14;

}  // namespace

void SessionTable::BeginCut(const SessionRef& origin, Cut& cut) {
  cut.layers.reserve(origin->layers.size());
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

int64_t SessionTable::CopiedPages(const Cut& cut) const {
  const int64_t rows = options_.page_rows;
  return (cut.end() + rows - 1) / rows - cut.length / rows;
}

// The tokens [begin, end) of the cut sequence, which are in one page, were next to each other in
// one page too.
void SessionTable::AddPieces(const Cut& cut, const CutLayer& layer, int64_t begin, int64_t end,
                             std::vector<HostPiece>& pieces) const {
  const int64_t rows = options_.page_rows, first = cut.length / rows;
  const int64_t was =
      begin < cut.length ? begin : cut.moved[static_cast<size_t>(begin - cut.length)];
  char* const base = static_cast<char*>(cut.arena->memory().data);
  const auto page = [&](const std::vector<PageNumber>& pages, int64_t token) {
    return base + int64_t{pages[static_cast<size_t>(token / rows - first)]} * kPageUnitBytes;
  };
  char* const source = page(layer.from, was);
  char* const copy = page(layer.to, begin);
  const Layer& of = cut.origin->layers[layer.layer];
  // On a device fewer pieces are faster, and rows after a fork or truncation are never read.
  if (!cut.arena->on_host() && cut.moved.empty()) {
    pieces.push_back({source, copy, of.layout.page_bytes});
    return;
  }
  const int64_t size = DTypeBytes(of.shape.dtype);
  for (const auto& [at, dim] :
       {std::pair{int64_t{0}, of.shape.dim}, std::pair{of.layout.k_bytes, of.shape.dim_v}}) {
    for (int64_t head = 0; head < of.shape.heads_kv; ++head) {
      char* const from = source + at + (head * rows + was % rows) * dim * size;
      char* const to = copy + at + (head * rows + begin % rows) * dim * size;
      pieces.push_back({from, to, (end - begin) * dim * size});
    }
  }
}

// Copies only the tokens that stay: an append may be writing others.
Status SessionTable::CopyTokens(const Cut& cut) const {
  const int64_t rows = options_.page_rows;
  const auto was = [&](int64_t token) {
    return token < cut.length ? token : cut.moved[static_cast<size_t>(token - cut.length)];
  };
  std::vector<HostPiece> pieces;
  for (const CutLayer& layer : cut.layers) {
    int64_t begin = cut.length / rows * rows;
    for (int64_t end = begin + 1; begin < cut.end(); ++end) {
      const bool goes_on = end < cut.end() && end % rows != 0 && was(end) == was(end - 1) + 1 &&
                           was(end) % rows != 0;
      if (goes_on) continue;
      AddPieces(cut, layer, begin, end, pieces);
      begin = end;
      if (pieces.size() < kPiecesMax) continue;
      ATTEND_RETURN_IF_ERROR(cut.arena->Copy(pieces));
      pieces.clear();
    }
  }
  return cut.arena->Copy(pieces);
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
    if (status.ok()) status = CopyTokens(cut);
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
  cut.length = kept;
  return ForkLayers(cut, refusal);
}

// Takes all pages of one size at once.
Status SessionTable::TakeCopies(const CopyLayers& layers, Cut& cut, CacheRefusal* refusal) {
  const PageTree& tree = TreeOf(*cut.origin);
  const int64_t copies = CopiedPages(cut);
  const int64_t first = cut.length / options_.page_rows;
  const int64_t last = cut.moved.empty() ? first : cut.moved.back() / options_.page_rows;
  const auto charge = [&](const auto& layer) {
    return tree.Charge(layer.first) * std::ssize(layer.second) * copies;
  };
  int64_t later_bytes = 0;
  for (const auto& layer : layers) later_bytes += charge(layer);
  std::vector<PageNumber> taken;
  for (const auto& layer : layers) {
    const auto& [page_bytes, numbers] = layer;
    later_bytes -= charge(layer);
    const size_t begin = cut.layers.size();
    for (const size_t n : numbers) {
      CutLayer& of = cut.layers.emplace_back(CutLayer{n});
      for (int64_t page = first; page <= last; ++page) {
        of.from.push_back(PageTree::PageAt(*cut.leaf, n, page));
      }
      of.to.reserve(static_cast<size_t>(copies));
    }
    taken.clear();
    ATTEND_RETURN_IF_ERROR(TakePages(*cut.origin, page_bytes, std::ssize(numbers) * copies,
                                     later_bytes, taken, refusal));
    auto next = taken.begin();
    for (size_t n = begin; n < cut.layers.size(); ++n, next += copies) {
      cut.layers[n].to.assign(next, next + copies);  // capacity was reserved
    }
  }
  return Status();
}

// Full pages are shared; the page at the cut is copied.
Status SessionTable::ForkLayers(Cut& cut, CacheRefusal* refusal) {
  const Session& origin = *cut.origin;
  Session& fork = *cut.fork;
  const int64_t rows = options_.page_rows, length = cut.length;
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
  return TakeCopies(copied, cut, refusal);
}

// If a step here throws, the next call sees the state unchanged.
Result<SessionInfo> SessionTable::EndFork(Cut& cut, Status status) {
  const MutexLock lock(mutex_);
  if (cut.origin == nullptr) return status;
  Session& fork = *cut.fork;
  PageTree& tree = TreeOf(fork);
  for (; !cut.layers.empty(); cut.layers.pop_back()) {
    const CutLayer& layer = cut.layers.back();
    if (status.ok()) {
      tree.Append(*fork.leaf, layer.layer, layer.to);
    } else {
      tree.Give(fork.tenant, layer.to);
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
  Cut cut;
  cut.length = length;
  return Shorten(tenant, id, cut, refusal);
}

Result<SessionInfo> SessionTable::Shorten(int tenant, const std::string& id, Cut& cut,
                                          CacheRefusal* refusal) {
  const OnNoMemory wait(OnNoMemory::kWait);
  SessionInfo info;
  Status status;
  {
    const MutexLock lock(mutex_);
    ATTEND_RETURN_IF_ERROR(BeginTruncate(tenant, id, cut));
    try {
      info = InfoOf(*cut.origin);  // while the session can still be left unchanged
      status = CopyShared(cut, refusal);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
    }
    assert(ConsistentLocked());
    // If nothing is copied, finish under the same lock: a page could become shared in between.
    if (!status.ok() || cut.layers.empty()) return EndTruncate(cut, std::move(status), info);
  }
  try {
    status = CopyTokens(cut);
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  const MutexLock lock(mutex_);
  return EndTruncate(cut, std::move(status), info);
}

// If OK, EndTruncate must follow.
Status SessionTable::BeginTruncate(int tenant, const std::string& id, Cut& cut) {
  ExpireLocked();
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  Session& session = **found;
  const bool changing = std::any_of(session.layers.begin(), session.layers.end(),
                                    [](const Layer& layer) { return layer.changing; });
  // An append or truncation under way decides which tokens a draft has.
  if (cut.draft != 0 && !changing) ATTEND_RETURN_IF_ERROR(CheckDraft(session, cut));
  const int64_t longest = session.longest();
  if (cut.draft == 0 && (cut.length < 0 || cut.length > longest)) {
    return Status(Code::kOutOfRange, OutOfBounds("length", cut.length, 0, longest));
  }
  if (changing) return Unavailable("session: an append or a truncation is under way");
  BeginCut(*found, cut);
  Use(session, 1);
  for (Layer& layer : session.layers) layer.changing = true;
  return Status();
}

// Takes copies of the pages that are written to: those that moved tokens come to, in any case,
// and the cut page if it is shared or being read. The other readers keep the originals.
Status SessionTable::CopyShared(Cut& cut, CacheRefusal* refusal) {
  const Session& session = *cut.origin;
  const int64_t rows = options_.page_rows;
  const PageTree::Branch& leaf = *cut.leaf;
  const bool read = leaf.pins > 1 || leaf.children > 0;  // one pin is this truncation's own
  const bool own = !read && cut.length / rows >= leaf.begin;
  if (cut.moved.empty() && (cut.length % rows == 0 || own)) return Status();
  CopyLayers cuts;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const Layer& layer = session.layers[n];
    if (cut.length < layer.length) cuts[layer.layout.page_bytes].push_back(n);
  }
  return TakeCopies(cuts, cut, refusal);
}

// If pages were copied, the tree keeps only those before them.
void SessionTable::CutLayers(Cut& cut) {
  Session& session = *cut.origin;
  PageTree& tree = TreeOf(session);
  const int64_t rows = options_.page_rows;
  const int64_t left = (cut.length + (cut.layers.empty() ? rows - 1 : 0)) / rows;
  std::vector<int64_t> kept(session.layers.size());
  for (size_t n = 0; n < kept.size(); ++n) {
    const int64_t pages = PageTree::PagesOf(*session.leaf, n);
    kept[n] = cut.length < session.layers[n].length ? left : pages;
  }
  session.leaf = tree.Cut(*session.leaf, kept, CopiedPages(cut));
  for (; !cut.layers.empty(); cut.layers.pop_back()) {
    const CutLayer& layer = cut.layers.back();
    tree.Append(*session.leaf, layer.layer, layer.to);
  }
  for (size_t n = 0; n < kept.size(); ++n) {
    Layer& layer = session.layers[n];
    if (cut.length >= layer.length) continue;
    PageTree::Fit(*session.leaf, n);
    layer.length = cut.end();
    layer.append_id.clear();
    layer.evicted_from = -1;
  }
  session.draft = cut.draft;
}

Result<SessionInfo> SessionTable::EndTruncate(Cut& cut, Status status, SessionInfo& info) {
  Session& session = *cut.origin;
  PageTree& tree = TreeOf(session);
  for (Layer& layer : session.layers) layer.changing = false;
  EndCut(cut);  // pages that nothing else reads may be freed
  if (status.ok() && session.leaf == nullptr) {
    status = Status(Code::kNotFound, "session: freed in the meantime");
  }
  if (status.ok()) {
    try {
      if (cut.length < session.longest()) CutLayers(cut);
      Touch(session);
    } catch (const std::bad_alloc&) {
      status = OutOfMemory();
    }
  }
  for (; !cut.layers.empty(); cut.layers.pop_back()) {
    tree.Give(session.tenant, cut.layers.back().to);
  }
  Use(session, -1);
  assert(ConsistentLocked());
  if (!status.ok()) return status;
  Update(session, info);
  return std::move(info);
}

}  // namespace attend
