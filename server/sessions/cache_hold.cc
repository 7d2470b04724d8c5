// SPDX-License-Identifier: Apache-2.0
//
// What requests do with sessions: they hold caches, append to them and let them go.

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"
#include "server/sessions/session_table.h"

namespace attend {
namespace {

std::string NameOf(int64_t index) { return "sessions[" + std::to_string(index) + "]"; }

Status WrongLength(const Layer& layer, const CacheUse& use, const std::string& name) {
  const std::string lengths = name + ".length is " + std::to_string(use.length) +
                              ", the layer has " + std::to_string(layer.length) + " tokens";
  if (layer.evicted_from >= 0 && use.length > layer.length) {
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

void CacheHold::MovePages(PageNumber* table, int64_t stride) {
  for (Sequence& sequence : sequences_) {
    std::fill(std::copy(sequence.pages.begin(), sequence.pages.end(), table), table + stride, 0);
    sequence.pages = {table, sequence.pages.size()};
    table += stride;
  }
  pages_.clear();
}

void CacheHold::Commit() { table_.CommitHold(*this); }

void CacheHold::End() {
  if (!sessions_.empty()) table_.EndHold(*this);
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
          use.length == layer.append_begin && layer.length == use.length + new_rows;
  if (there) return Status();
  if (use.length != layer.length) return WrongLength(layer, use, name);
  if (new_rows > 0 && layer.changing) {
    return Unavailable(name + ": another append to layer " + std::to_string(use.layer) +
                       " is under way");
  }
  if (layer.length + new_rows <= kLengthMax) return Status();
  return InvalidArgument(name + " would have " + std::to_string(layer.length + new_rows) +
                         " tokens, may have at most " + std::to_string(kLengthMax));
}

Result<std::unique_ptr<CacheHold>> SessionTable::Hold(int tenant, std::span<const CacheUse> uses,
                                                      int64_t new_rows) {
  std::unique_ptr<CacheHold> hold(new CacheHold(*this));
  hold->uses_.assign(uses.begin(), uses.end());
  const MutexLock lock(mutex_);
  ATTEND_RETURN_IF_ERROR(FillHold(tenant, new_rows, *hold));
  return hold;
}

Status SessionTable::FillHold(int tenant, int64_t new_rows, CacheHold& hold) {
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
    sessions.push_back(session);
  }
  // All sequences' appends are committed at once, so a repeated request finds all of them or none.
  if (there_count > 0 && there_count < std::ssize(hold.uses_)) {
    return Status(Code::kFailedPrecondition,
                  "sessions: some have been appended to under their append_id, others not");
  }
  hold.append_rows_ = there_count > 0 ? 0 : new_rows;
  return TakeAppends(hold, std::move(sessions));
}

Status SessionTable::TakeAppends(CacheHold& hold, std::vector<SessionRef> sessions) {
  const int64_t rows = hold.layout_.page_rows;
  const size_t count = sessions.size();
  // What is large is allocated before anything is changed, and may fail.
  hold.sequences_.reserve(count);
  hold.pages_.resize(count);
  for (size_t n = 0; n < count; ++n) {
    Layer& layer = sessions[n]->layers[hold.uses_[n].layer];
    const int64_t pages = (layer.length + hold.append_rows_ + rows - 1) / rows;
    hold.pages_[n].reserve(static_cast<size_t>(pages));
    layer.pages.reserve(static_cast<size_t>(pages));
  }
  const OnNoMemory wait(OnNoMemory::kWait);
  for (const SessionRef& session : sessions) ++session->in_use;
  Status status;
  for (size_t n = 0; n < count; ++n) {
    const Layer& layer = sessions[n]->layers[hold.uses_[n].layer];
    const int64_t length = layer.length + hold.append_rows_;
    std::vector<PageNumber>& pages = hold.pages_[n];
    status = TakePages(*sessions[n], hold.layout_.page_bytes,
                       (length + rows - 1) / rows - std::ssize(layer.pages), pages);
    if (!status.ok()) break;
    pages.insert(pages.begin(), layer.pages.begin(), layer.pages.end());
    hold.sequences_.push_back({pages, length});
  }
  PagePool& pool = *pools_[hold.device_].pages;
  for (size_t n = 0; n < hold.sequences_.size(); ++n) {
    Layer& layer = sessions[n]->layers[hold.uses_[n].layer];
    const std::span<const PageNumber> pages = hold.sequences_[n].pages;
    if (status.ok()) {
      pool.AddReferences(pages.first(layer.pages.size()));
      layer.changing |= hold.append_rows_ > 0;
    } else {
      DropPages(*sessions[n], layer, pages.subspan(layer.pages.size()));
    }
  }
  if (status.ok()) {
    hold.sessions_ = std::move(sessions);  // from now on the hold has something to give back
  } else {
    for (const SessionRef& session : sessions) --session->in_use;
    hold.sequences_.clear();
  }
  return status;
}

void SessionTable::CommitHold(CacheHold& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  hold.committed_ = true;
  for (size_t n = 0; n < hold.sessions_.size() && hold.append_rows_ > 0; ++n) {
    Session& session = *hold.sessions_[n];
    Layer& layer = session.layers[hold.uses_[n].layer];
    layer.changing = false;
    if (!sessions_.contains(session.id)) continue;
    const std::span<const PageNumber> fresh = hold.sequences_[n].pages.subspan(layer.pages.size());
    pools_[session.device].pages->AddReferences(fresh);
    layer.pages.insert(layer.pages.end(), fresh.begin(), fresh.end());
    layer.append_begin = layer.length;
    layer.append_id = hold.uses_[n].append_id;
    layer.length = hold.sequences_[n].length;
    layer.evicted_from = -1;
    stats_.appended_tokens += hold.append_rows_;
  }
}

void SessionTable::EndHold(CacheHold& hold) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  for (size_t n = 0; n < hold.sessions_.size(); ++n) {
    Session& session = *hold.sessions_[n];
    Layer& layer = session.layers[hold.uses_[n].layer];
    if (hold.append_rows_ > 0 && !hold.committed_) layer.changing = false;
    DropPages(session, layer, hold.sequences_[n].pages);
    --session.in_use;
    if (sessions_.contains(session.id)) Touch(session);
  }
  hold.sessions_.clear();
}

}  // namespace attend
