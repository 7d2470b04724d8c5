// SPDX-License-Identifier: Apache-2.0
//
// What requests do with sessions: they hold caches, append to them and let them go.

#include "server/sessions/cache_hold.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <list>
#include <utility>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {
namespace {

std::string NameOf(int64_t index) { return "sessions[" + std::to_string(index) + "]"; }

// What the client has appended may have been evicted: then it asks for an append, or a length, that
// ends after the layer's last token.
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
  for (const Sequence& sequence : sequences_) length = std::max(length, sequence.length);
  return length;
}

Status CacheHold::Reserve(PageNumber* table, int64_t stride, CacheRefusal* refusal,
                          Firmness firmness) {
  pages_ = table;
  stride_ = stride;
  return table_.ReserveHold(*this, refusal, firmness);
}

Status CacheHold::Confirm(CacheRefusal* refusal) { return table_.ConfirmHold(*this, refusal); }

void CacheHold::Commit() { table_.CommitHold(*this); }

void CacheHold::End() {
  if (!std::exchange(ended_, true)) table_.EndHold(*this);
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
  return InvalidArgument(name + " has " + std::to_string(layer.length) + " tokens, and " +
                         std::to_string(new_rows) + " more would exceed the " +
                         std::to_string(kLengthMax) + " that it may have");
}

Result<std::unique_ptr<CacheHold>> SessionTable::Hold(int tenant, std::span<const CacheUse> uses,
                                                      int64_t new_rows, CacheRefusal* refusal) {
  std::unique_ptr<CacheHold> hold(new CacheHold(*this));
  hold->uses_.assign(uses.begin(), uses.end());
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  Status status = FillHold(tenant, new_rows, *hold);
  if (status.ok()) status = CheckFits(*hold);
  if (status.ok()) return hold;
  Explain(status, tenant, uses, refusal);
  return status;
}

void SessionTable::Explain(const Status& status, int tenant, std::span<const CacheUse> uses,
                           CacheRefusal* refusal) const {
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

// However many pages others give up, a sequence needs all of its own at once, and all sequences the
// new ones.
Status SessionTable::CheckFits(const CacheHold& hold) const {
  const int64_t bytes = pools_[hold.device_].pages->stats().total_bytes;
  const int64_t page_bytes = hold.layout_.page_bytes;
  int64_t fresh = 0;
  for (size_t n = 0; n < hold.sessions_.size() && hold.append_rows_ > 0; ++n) {
    const int64_t pages = hold.PagesOf(n);
    fresh += pages - std::ssize(hold.sessions_[n]->layers[hold.uses_[n].layer].pages);
    const int64_t needed = std::max(pages, fresh);
    if (needed <= bytes / page_bytes) continue;
    return InvalidArgument(
        NameOf(static_cast<int64_t>(n)) + ": an append of " + std::to_string(hold.append_rows_) +
        " rows needs " + std::to_string(needed) + " pages of " + std::to_string(page_bytes) +
        " bytes, the device has " + std::to_string(bytes) + " bytes for sessions (session-memory)");
  }
  return Status();
}

// Changes nothing, except that its sessions are in use.
Status SessionTable::FillHold(int tenant, int64_t new_rows, CacheHold& hold) {
  hold.tenant_ = tenant;
  int64_t there_count = 0;
  std::vector<SessionRef> sessions;
  for (int64_t n = 0; n < std::ssize(hold.uses_); ++n) {
    const CacheUse& use = hold.uses_[n];
    Result<SessionRef> found = Find(tenant, use.session);
    if (!found.ok())
      return Status(found.status().code(), NameOf(n) + ": " + found.status().message());
    const SessionRef& session = *found;
    if (std::find(sessions.begin(), sessions.end(), session) != sessions.end()) {
      return InvalidArgument(NameOf(n) + " names a session a second time");
    }
    bool there = false;
    ATTEND_RETURN_IF_ERROR(CheckUse(use, n, *session, new_rows, there));
    there_count += there ? 1 : 0;
    const Layer& layer = session->layers[use.layer];
    if (n == 0) {
      hold.device_ = session->device;
      hold.arena_ = pools_[session->device].arena;
      hold.shape_ = layer.shape;
      hold.layout_ = layer.layout;
    }
    if (session->device != hold.device_ || layer.shape != hold.shape_) {
      return InvalidArgument(NameOf(n) +
                             " has another device or shape than sessions[0]; those of "
                             "one request must be alike");
    }
    hold.sequences_.push_back({{}, layer.length});
    sessions.push_back(session);
  }
  // All sequences' appends are committed at once, so a repeated request finds all of them or none.
  if (there_count > 0 && there_count < std::ssize(hold.uses_)) {
    return Status(Code::kFailedPrecondition,
                  "sessions: some have been appended to under their append_id, others not");
  }
  hold.new_rows_ = new_rows;
  hold.append_rows_ = there_count > 0 ? 0 : new_rows;
  for (CacheHold::Sequence& sequence : hold.sequences_) sequence.length += hold.append_rows_;
  hold.number_ = ++last_hold_;
  holds_.insert(&hold);
  for (const SessionRef& session : sessions) ++session->in_use;
  hold.sessions_ = std::move(sessions);  // from now on the hold has something to give back
  assert(ConsistentLocked());
  return Status();
}

Status SessionTable::ReserveHold(CacheHold& hold, CacheRefusal* refusal,
                                 CacheHold::Firmness firmness) {
  assert(hold.reserved_.empty());
  const MutexLock lock(mutex_);
  if (hold.sessions_.empty()) return Status();
  Status status = TakeFor(hold, refusal);
  hold.provisional_ = status.ok() && firmness == CacheHold::Firmness::kProvisional;
  assert(ConsistentLocked());
  if (!status.ok()) Explain(status, hold.sessions_[0]->tenant, hold.uses_, refusal);
  return status;
}

Status SessionTable::TakeFor(CacheHold& hold, CacheRefusal* refusal) {
  const size_t count = hold.sessions_.size();
  for (size_t n = 0; n < count; ++n) {
    const Session& session = *hold.sessions_[n];
    const std::string name = NameOf(static_cast<int64_t>(n));
    if (!sessions_.contains(session.id)) {
      return Status(Code::kNotFound, name + ": the session has been freed");
    }
    bool there = false;
    ATTEND_RETURN_IF_ERROR(
        CheckUse(hold.uses_[n], static_cast<int64_t>(n), session, hold.new_rows_, there));
    if (there != (hold.append_rows_ < hold.new_rows_)) {
      return Unavailable(name + ": another request has just " +
                         (there ? "made this append" : "undone this append"));
    }
  }
  // What is large is allocated before anything is changed, and may fail.
  int64_t needed = 0, pinned = 0;
  for (size_t n = 0; n < count; ++n) {
    const Session& session = *hold.sessions_[n];
    assert(hold.PagesOf(n) <= hold.stride_);
    const int64_t more = hold.PagesOf(n) - std::ssize(session.layers[hold.uses_[n].layer].pages);
    needed += more;
    if (session.pinned) pinned += more;
  }
  ATTEND_RETURN_IF_ERROR(MakeRoom(hold.sessions_[0]->tenant, {0, needed * kPageEntryBytes},
                                  {0, pinned * kPageEntryBytes}));
  // All sessions are one tenant's, and none of them is evicted for another.
  const Session& first = *hold.sessions_[0];
  const int64_t page_bytes = hold.layout_.page_bytes;
  ATTEND_RETURN_IF_ERROR(CheckPinned(first, pinned * page_bytes));
  for (size_t n = 0; n < count; ++n) {
    Layer& layer = hold.sessions_[n]->layers[hold.uses_[n].layer];
    std::vector<PageNumber>& pages = layer.pages;
    const auto wanted = static_cast<size_t>(hold.PagesOf(n));
    // Twice as many at least, so that a list that grows by a page each time is rarely moved.
    if (pages.capacity() < wanted) pages.reserve(std::max(wanted, 2 * pages.capacity()));
    CountList(*hold.sessions_[n], layer);
  }
  std::vector<CacheHold::Reserved> reserved(count);
  std::list<Readers> readers(count);
  std::vector<PageNumber> fresh;
  const OnNoMemory wait(OnNoMemory::kWait);
  ATTEND_RETURN_IF_ERROR(TakePages(first, page_bytes, needed, fresh, refusal));
  auto next = fresh.begin();
  PageNumber* table = hold.pages_;
  for (size_t n = 0; n < count; ++n, table += hold.stride_) {
    CacheHold::Sequence& sequence = hold.sequences_[n];
    Layer& layer = hold.sessions_[n]->layers[hold.uses_[n].layer];
    if (layer.readers.empty() || !layer.readers.back().cut.empty()) {
      layer.readers.splice(layer.readers.end(), readers, readers.begin());
    }
    ++layer.readers.back().count;
    reserved[n] = {layer.pages.size(), std::prev(layer.readers.end())};
    if (hold.append_rows_ > 0) {
      layer.changing = true;
      layer.append = {&hold, n};
    }
    const auto pages = static_cast<size_t>(hold.PagesOf(n));
    PageNumber* const added = std::copy(layer.pages.begin(), layer.pages.end(), table);
    const auto end = next + (static_cast<int64_t>(pages) - std::ssize(layer.pages));
    std::fill(std::copy(next, end, added), table + hold.stride_, 0);
    next = end;
    sequence.pages = {table, pages};
  }
  hold.reserved_ = std::move(reserved);
  return Status();
}

void SessionTable::CommitHold(CacheHold& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  assert(!hold.reserved_.empty() && !hold.committed_ && !hold.provisional_);
  hold.committed_ = true;
  for (size_t n = 0; n < hold.sessions_.size() && hold.append_rows_ > 0; ++n) {
    Session& session = *hold.sessions_[n];
    Layer& layer = session.layers[hold.uses_[n].layer];
    assert(layer.changing);
    layer.changing = false;
    layer.append = {};
    if (hold.reserved_[n].doomed) continue;  // as if it were evicted, or freed, after the commit
    assert(sessions_.contains(session.id));
    assert(layer.length + hold.append_rows_ == hold.sequences_[n].length);
    const std::span<const PageNumber> fresh = hold.OwnPages(n);
    hold.reserved_[n].own = hold.sequences_[n].pages.size();
    layer.pages.insert(layer.pages.end(), fresh.begin(), fresh.end());
    CountList(session, layer);
    layer.append_begin = layer.length;
    layer.append_id.swap(hold.uses_[n].append_id);  // an assignment might allocate
    layer.length = hold.sequences_[n].length;
    layer.evicted_from = -1;
    stats_.appended_tokens[session.tenant] += hold.append_rows_;
  }
  assert(ConsistentLocked());
}

void SessionTable::EndRead(Session& session, Layer& layer, Readers& readers) {
  --readers.count;
  std::list<Readers>& all = layer.readers;
  for (; !all.empty() && all.front().count == 0; all.pop_front()) {
    DropPages(session, layer, all.front().cut, true);
  }
  // The last readers of a session that was freed meanwhile leave nothing.
  if (all.empty() && !layer.changing && !sessions_.contains(session.id)) {
    Shorten(session, layer, 0);
  }
}

void SessionTable::EndHold(CacheHold& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  if (!hold.sessions_.empty()) LetGo(hold);
  assert(ConsistentLocked());
}

void SessionTable::LetGo(CacheHold& hold) {
  for (size_t n = 0; n < hold.sessions_.size(); ++n) {
    Session& session = *hold.sessions_[n];
    Layer& layer = session.layers[hold.uses_[n].layer];
    if (!hold.reserved_.empty()) {
      if (hold.append_rows_ > 0 && !hold.committed_) {
        layer.changing = false;
        layer.append = {};
      }
      DropPages(session, layer, hold.OwnPages(n), hold.reserved_[n].doomed);
      EndRead(session, layer, *hold.reserved_[n].readers);
    }
    if (!hold.committed_ && !layer.changing) FitList(session, layer);  // room for nothing
    --session.in_use;
    if (sessions_.contains(session.id)) Touch(session);
  }
  hold.sessions_.clear();
  hold.reserved_.clear();
  holds_.erase(&hold);
}

Status SessionTable::ConfirmHold(CacheHold& hold, CacheRefusal* refusal) {
  const MutexLock lock(mutex_);
  if (!hold.provisional_) return Status();
  Status status;
  if (hold.sessions_.empty()) {
    const int64_t append_rows = hold.append_rows_;
    hold.sequences_.clear();
    status = FillHold(hold.tenant_, hold.new_rows_, hold);
    if (status.ok() && hold.append_rows_ != append_rows) {
      status = Unavailable("sessions: another request has made or undone this append meanwhile");
    }
    if (status.ok()) status = TakeFor(hold, refusal);
    if (!status.ok()) Explain(status, hold.tenant_, hold.uses_, refusal);
  }
  hold.provisional_ = false;
  assert(ConsistentLocked());
  return status;
}

}  // namespace attend
