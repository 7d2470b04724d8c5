// SPDX-License-Identifier: Apache-2.0
//
// How requests use sessions: hold, reserve, commit, end.
//
// Every step re-validates under the table's lock, because sessions may be freed, truncated or
// evicted between Hold and Reserve. Reserve pins the leaves, so from then on pages cannot change.
// All allocations that may fail come before the first change; Commit and End cannot fail.
//
// Invariant: an append is all or nothing across the sequences of a request. `changing` is set on
// each appended layer from Reserve to Commit or End, so at most one append to a layer is in
// progress.

#include "server/sessions/cache_hold.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {
namespace {

std::string NameOf(int64_t index) { return "sessions[" + std::to_string(index) + "]"; }

// If the client's last tokens were evicted, it asks for an append at, or a length of, more tokens
// than the layer has left.
Status WrongLength(const Layer& layer, const CacheUse& use, int64_t new_rows,
                   const std::string& name) {
  const std::string lengths = name + ".length is " + std::to_string(use.length) +
                              ", the layer has " + std::to_string(layer.length) + " tokens";
  if (layer.evicted_from >= 0 && use.length >= 0 &&
      (use.length > layer.length || new_rows > layer.length - use.length)) {
    return Status(Code::kOutOfRange, lengths + ": the others were evicted; append them again");
  }
  return Status(Code::kFailedPrecondition, lengths);
}

}  // namespace

CacheHold::~CacheHold() { End(); }

int64_t CacheHold::length_max() const {
  int64_t length = 0;
  for (const Sequence& sequence : held_->sequences) length = std::max(length, sequence.length);
  return length;
}

Status CacheHold::Reserve(PageNumber* table, int64_t stride, CacheRefusal* refusal) {
  return table_.Reserve(*held_, table, stride, refusal);
}

void CacheHold::Commit() { table_.Commit(*held_); }

void CacheHold::End() {
  if (!std::exchange(ended_, true)) table_.End(*held_);
}

Status SessionTable::CheckUse(const CacheUse& use, int64_t index, const Session& session,
                              int64_t new_rows, bool& there) const {
  const std::string name = NameOf(index);
  if (use.layer < 0 || use.layer >= std::ssize(session.layers)) {
    return InvalidArgument(name + ".layer is " + std::to_string(use.layer) + ", must be in [0, " +
                           std::to_string(session.layers.size() - 1) + "]");
  }
  const Layer& layer = session.layers[use.layer];
  there = new_rows > 0 && !use.append_id.empty() && use.append_id == layer.append_id &&
          use.length == layer.append_begin && layer.length - layer.append_begin == new_rows;
  if (there) return Status();
  if (use.length != layer.length) return WrongLength(layer, use, new_rows, name);
  if (new_rows > 0 && layer.changing) {
    return Unavailable(name + ": another append to layer " + std::to_string(use.layer) +
                       " is under way");
  }
  if (new_rows <= kLengthMax - layer.length) return Status();
  return InvalidArgument(name + " has " + std::to_string(layer.length) + " tokens; " +
                         std::to_string(new_rows) + " more would exceed the limit of " +
                         std::to_string(kLengthMax));
}

Result<std::unique_ptr<CacheHold>> SessionTable::Hold(int tenant, std::span<const CacheUse> uses,
                                                      int64_t new_rows, CacheRefusal* refusal) {
  auto record = std::make_unique<HeldCaches>();
  HeldCaches& held = *record;
  held.uses.assign(uses.begin(), uses.end());
  auto hold = std::make_unique<CacheHold>(*this, std::move(record));
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  Status status = FillHold(tenant, new_rows, held);
  if (status.ok()) status = CheckFits(held);
  if (status.ok()) return hold;
  Explain(status, tenant, uses, refusal);
  return status;
}

void SessionTable::Explain(const Status& status, int tenant, std::span<const CacheUse> uses,
                           CacheRefusal* refusal) {
  const bool length =
      status.code() == Code::kFailedPrecondition || status.code() == Code::kOutOfRange;
  if (!length || refusal == nullptr) return;
  for (const CacheUse& use : uses) {
    const SessionRef session = Look(tenant, use.session);
    const bool known =
        session != nullptr && use.layer >= 0 && use.layer < std::ssize(session->layers);
    refusal->lengths.push_back(known ? session->layers[use.layer].length : -1);
  }
}

// Whether the append could fit if everything else were evicted: each sequence needs all of its
// pages at once, and the new pages of all sequences are needed at once.
Status SessionTable::CheckFits(const HeldCaches& hold) const {
  const PageTree& tree = *devices_[hold.device].pages;
  const int64_t bytes = tree.ledger().most(hold.sessions[0]->tenant);
  const int64_t page_bytes = tree.Charge(hold.layout.page_bytes);
  int64_t fresh = 0;
  for (size_t n = 0; n < hold.sessions.size() && hold.append_rows > 0; ++n) {
    const int64_t pages = hold.PagesOf(n);
    fresh += pages - PageTree::PagesOf(*hold.sessions[n]->leaf, hold.uses[n].layer);
    const int64_t needed = std::max(pages, fresh);
    if (needed <= bytes / page_bytes) continue;
    return InvalidArgument(
        NameOf(static_cast<int64_t>(n)) + ": an append of " + std::to_string(hold.append_rows) +
        " rows needs " + std::to_string(needed) + " pages of " + std::to_string(page_bytes) +
        " bytes, the tenant may have at most " + std::to_string(bytes) + " (session-memory)");
  }
  return Status();
}

// Changes nothing but the sessions' use counts.
Status SessionTable::FillHold(int tenant, int64_t new_rows, HeldCaches& hold) {
  int64_t there_count = 0;
  std::vector<SessionRef> sessions;
  for (int64_t n = 0; n < std::ssize(hold.uses); ++n) {
    const CacheUse& use = hold.uses[n];
    Result<SessionRef> found = Find(tenant, use.session);
    if (!found.ok())
      return Status(found.status().code(), NameOf(n) + ": " + found.status().message());
    const SessionRef& session = *found;
    if (std::find(sessions.begin(), sessions.end(), session) != sessions.end()) {
      return InvalidArgument(NameOf(n) + " names the same session as an earlier entry");
    }
    bool there = false;
    ATTEND_RETURN_IF_ERROR(CheckUse(use, n, *session, new_rows, there));
    there_count += there ? 1 : 0;
    const Layer& layer = session->layers[use.layer];
    if (n == 0) {
      hold.device = session->device;
      hold.arena = devices_[session->device].arena;
      hold.shape = layer.shape;
      hold.layout = layer.layout;
    }
    if (session->device != hold.device || layer.shape != hold.shape) {
      return InvalidArgument(NameOf(n) +
                             " has another device or shape than sessions[0]; all sessions of a "
                             "request must have the same");
    }
    hold.sequences.push_back({{}, layer.length});
    sessions.push_back(session);
  }
  // Appends of all sequences commit at once, so a retried request finds either all of them or none.
  if (there_count > 0 && there_count < std::ssize(hold.uses)) {
    return Status(
        Code::kFailedPrecondition,
        "sessions: some have already made the append of their append_id, others have not");
  }
  hold.new_rows = new_rows;
  hold.append_rows = there_count > 0 ? 0 : new_rows;
  for (HeldCaches::Sequence& sequence : hold.sequences) sequence.length += hold.append_rows;
  holds_.insert(&hold);
  for (const SessionRef& session : sessions) Use(*session, 1);
  hold.sessions = std::move(sessions);  // from here on the hold has something to release
  assert(ConsistentLocked());
  return Status();
}

Status SessionTable::Reserve(HeldCaches& hold, PageNumber* table, int64_t stride,
                             CacheRefusal* refusal) {
  assert(hold.own.empty());
  const MutexLock lock(mutex_);
  if (hold.sessions.empty()) return Status();
  Status status = CheckHold(hold);
  if (status.ok()) status = TakeFor(hold, table, stride, refusal);
  assert(ConsistentLocked());
  if (!status.ok()) Explain(status, hold.sessions[0]->tenant, hold.uses, refusal);
  return status;
}

Status SessionTable::CheckHold(HeldCaches& hold) {
  for (size_t n = 0; n < hold.sessions.size(); ++n) {
    Session& session = *hold.sessions[n];
    const std::string name = NameOf(static_cast<int64_t>(n));
    if (session.leaf == nullptr) {
      return Status(Code::kNotFound, name + ": the session has been freed");
    }
    Settle(session);
    bool there = false;
    ATTEND_RETURN_IF_ERROR(
        CheckUse(hold.uses[n], static_cast<int64_t>(n), session, hold.new_rows, there));
    if (there != (hold.append_rows < hold.new_rows)) {
      return Unavailable(name + ": another request has just " +
                         (there ? "made this append" : "undone this append"));
    }
  }
  return Status();
}

Status SessionTable::TakeFor(HeldCaches& hold, PageNumber* table, int64_t stride,
                             CacheRefusal* refusal) {
  const size_t count = hold.sessions.size();
  int64_t needed = 0;
  std::vector<size_t> own(count);
  for (size_t n = 0; n < count; ++n) {
    assert(hold.PagesOf(n) <= stride);
    const int64_t layer = hold.uses[n].layer;
    const int64_t pages = PageTree::PagesOf(*hold.sessions[n]->leaf, layer);
    own[n] = static_cast<size_t>(pages);
    needed += hold.PagesOf(n) - pages;
  }
  ATTEND_RETURN_IF_ERROR(CheckTables(hold.sessions[0]->tenant, needed * kPageEntryBytes));
  // Large allocations, which may fail, come before any change. End releases what stays unused.
  for (size_t n = 0; n < count; ++n) {
    PageTree::Reserve(*hold.sessions[n]->leaf, hold.uses[n].layer,
                      hold.PagesOf(n) - static_cast<int64_t>(own[n]));
  }
  hold.leaves.reserve(count);
  std::vector<PageNumber> fresh;
  const OnNoMemory wait(OnNoMemory::kWait);
  // All sessions belong to one tenant and are in use, so none is evicted for another.
  ATTEND_RETURN_IF_ERROR(
      TakePages(*hold.sessions[0], hold.layout.page_bytes, needed, 0, fresh, refusal));
  auto next = fresh.begin();
  for (size_t n = 0; n < count; ++n, table += stride) {
    HeldCaches::Sequence& sequence = hold.sequences[n];
    const int64_t layer = hold.uses[n].layer;
    const int64_t pages = hold.PagesOf(n);
    Session& session = *hold.sessions[n];
    session.layers[layer].changing |= hold.append_rows > 0;
    TreeOf(session).Pin(*session.leaf);
    hold.leaves.push_back(session.leaf);
    PageNumber* const added = PageTree::CopyPages(*session.leaf, layer, table);
    const auto end = next + (pages - static_cast<int64_t>(own[n]));
    std::fill(std::copy(next, end, added), table + stride, 0);
    next = end;
    sequence.pages = {table, static_cast<size_t>(pages)};
  }
  hold.own = std::move(own);
  return Status();
}

void SessionTable::Commit(HeldCaches& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  assert(!hold.own.empty() && !hold.committed);
  hold.committed = true;
  for (size_t n = 0; n < hold.sessions.size() && hold.append_rows > 0; ++n) {
    Session& session = *hold.sessions[n];
    Layer& layer = session.layers[hold.uses[n].layer];
    assert(layer.changing);
    layer.changing = false;
    if (session.leaf == nullptr) continue;  // as if it had been freed after the commit
    assert(layer.length + hold.append_rows == hold.sequences[n].length);
    TreeOf(session).Append(*session.leaf, hold.uses[n].layer, hold.OwnPages(n));
    hold.own[n] = hold.sequences[n].pages.size();
    layer.append_begin = layer.length;
    layer.append_id.swap(hold.uses[n].append_id);  // swapped, because an assignment might allocate
    layer.length = hold.sequences[n].length;
    layer.evicted_from = -1;
    session.draft = 0;
    stats_.appended_tokens[session.tenant] += hold.append_rows;
  }
  assert(ConsistentLocked());
}

void SessionTable::End(HeldCaches& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  for (size_t n = 0; n < hold.sessions.size(); ++n) {
    Session& session = *hold.sessions[n];
    PageTree& tree = TreeOf(session);
    const bool given_up = hold.append_rows > 0 && !hold.committed;
    Layer& layer = session.layers[hold.uses[n].layer];
    if (!hold.own.empty()) {
      if (given_up) layer.changing = false;
      tree.Give(session.tenant, hold.OwnPages(n));
    }
    // If another append to the layer is in progress, it has reserved capacity there.
    if (given_up && session.leaf != nullptr && !layer.changing) {
      PageTree::Fit(*session.leaf, hold.uses[n].layer);
    }
    if (!hold.leaves.empty()) tree.Unpin(*hold.leaves[n]);
    Use(session, -1);
    if (session.leaf != nullptr) Touch(session);
  }
  hold.sessions.clear();
  hold.leaves.clear();
  holds_.erase(&hold);
  assert(ConsistentLocked());
}

}  // namespace attend
