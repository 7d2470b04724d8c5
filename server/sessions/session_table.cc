// SPDX-License-Identifier: Apache-2.0
//
// Sessions come and go. How they are forked and cut is in session_cuts.cc, what requests do with
// them in cache_hold.cc, how memory is taken from those that have it idle in eviction.cc, how the
// tables have room for them in session_room.cc, what is always true of them all in
// session_audit.cc.

#include "server/sessions/session_table.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <new>
#include <thread>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"

namespace attend {
namespace {

Status NoSuchSession() { return Status(Code::kNotFound, "session: there is none with this id"); }

Status CheckLayer(const LayerShape& shape, int64_t index, int64_t page_rows, int64_t slab_bytes) {
  const std::string name = "layers[" + std::to_string(index) + "].";
  const auto check = [&](const char* field, int64_t value, int64_t high) {
    if (value >= 1 && value <= high) return Status();
    return InvalidArgument(OutOfBounds(name + field, value, 1, high));
  };
  ATTEND_RETURN_IF_ERROR(check("heads_kv", shape.heads_kv, kHeadsMax));
  ATTEND_RETURN_IF_ERROR(check("dim", shape.dim, kHeadDimMax));
  ATTEND_RETURN_IF_ERROR(check("dim_v", shape.dim_v, kHeadDimMax));
  const int64_t page_bytes = LayoutOf(shape, page_rows).page_bytes;
  if (page_bytes <= slab_bytes) return Status();
  return InvalidArgument(name + "heads_kv " + std::to_string(shape.heads_kv) + " makes pages of " +
                         std::to_string(page_bytes) + " bytes, must be at most " +
                         std::to_string(slab_bytes));
}

// A list looks at so many sessions, or layers of those that it lists, before others get their turn.
constexpr int64_t kListSlice = 1024;

// A session whose lease ends while it is in use is looked at again so much later, so that those of
// many requests that take their time do not make each call look at them.
constexpr std::chrono::seconds kLookInterval(1);

// The first ones: forks begin with the same pages, and every session loses pages from its end, so
// that whoever shares a page shares all before it.
int64_t SharedPages(const PagePool& pool, const Layer& layer) {
  const auto shared = [&pool](PageNumber page) { return pool.references(page) > 1; };
  if (layer.pages.empty() || !shared(layer.pages.front())) return 0;
  return std::partition_point(layer.pages.begin(), layer.pages.end(), shared) - layer.pages.begin();
}

}  // namespace

SessionTable::SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
                           const std::vector<SessionDevice>& devices)
    : options_(options),
      clock_(clock),
      tokens_(std::move(tokens)),
      tenants_(options.tenant_weights.size()) {
  stats_.appended_tokens.resize(options.tenant_weights.size());
  for (const SessionDevice& device : devices) {
    Pool pool;
    pool.arena = device.arena;
    const HostSpan memory = device.arena == nullptr ? HostSpan() : device.arena->memory();
    pool.pages = std::make_unique<PagePool>(memory, options.slab_bytes, device.on_free);
    pool.tenant_bytes.resize(options.tenant_weights.size());
    pool.tenant_coming.resize(options.tenant_weights.size());
    pool.claims.resize(options.tenant_weights.size());
    pools_.push_back(std::move(pool));
  }
}

SessionTable::~SessionTable() = default;

bool SessionTable::Over(const Session& session) const {
  return session.in_use == 0 && session.last_used + session.lease <= clock_.Now();
}

SessionTable::SessionRef SessionTable::Look(int tenant, const std::string& id) const {
  const auto found = sessions_.find(id);
  const bool own = found != sessions_.end() && found->second->tenant == tenant;
  return own && !Over(*found->second) ? found->second : nullptr;
}

Result<SessionTable::SessionRef> SessionTable::Find(int tenant, const std::string& id) {
  SessionRef session = Look(tenant, id);
  if (session == nullptr) return NoSuchSession();
  if (pools_[session->device].lost) {
    return Unavailable("session " + HexText(id) + " has ended: its device is lost");
  }
  Touch(*session);
  return session;
}

void SessionTable::Touch(Session& session) {
  auto use = by_use_.extract({session.last_used, &session});
  session.last_used = clock_.Now();
  if (use.empty()) {
    session.look_again = session.last_used + session.lease;
    by_use_.insert({session.last_used, &session});
    by_lease_end_.insert({session.look_again, &session});
    by_tenant_.emplace(std::pair(session.tenant, std::string_view(session.id)), &session);
    return;
  }
  use.value().first = session.last_used;
  by_use_.insert(std::move(use));
  LookAgain(session, session.last_used + session.lease);
}

void SessionTable::LookAgain(Session& session, TimePoint when) {
  auto lease_end = by_lease_end_.extract({session.look_again, &session});
  lease_end.value().first = session.look_again = when;
  by_lease_end_.insert(std::move(lease_end));
}

void SessionTable::Forget(Session& session) {
  by_use_.erase({session.last_used, &session});
  by_lease_end_.erase({session.look_again, &session});
  by_tenant_.erase({session.tenant, session.id});
}

SessionInfo SessionTable::Insert(const SessionRef& session) {
  session->last_used = clock_.Now();
  SessionInfo info = InfoOf(*session);  // first, as it may fail
  const auto placed = sessions_.emplace(session->id, session).first;
  try {
    Touch(*session);
  } catch (const std::bad_alloc&) {
    Forget(*session);
    sessions_.erase(placed);
    throw;
  }
  ++stats_.created;
  Count(*session, {1, FixedBytes(std::ssize(session->layers))});
  return info;
}

void SessionTable::Remove(const SessionRef& session) {
  Forget(*session);
  sessions_.erase(session->id);
  Count(*session, {-1, -FixedBytes(std::ssize(session->layers))});
  session->place.Release();
  for (Layer& layer : session->layers) {
    if (layer.readers.empty() && !layer.changing) {
      Shorten(*session, layer, 0);
      continue;
    }
    layer.leaving = true;
    LeavePages(*session, layer, layer.pages);
    DoomAppend(*session, layer);
  }
}

bool SessionTable::ExpireLocked() {
  const TimePoint now = clock_.Now();
  [[maybe_unused]] const int64_t before = stats_.expired;
  int64_t pages = 0;
  auto next = by_lease_end_.begin();
  while (next != by_lease_end_.end() && next->first <= now && pages < options_.pages_slice) {
    Session& session = *(next++)->second;
    if (session.in_use > 0) {
      LookAgain(session, now + kLookInterval);
      continue;
    }
    pages += session.page_count() + std::ssize(session.layers);
    Remove(SessionRef(sessions_.at(session.id)));
    ++stats_.expired;
  }
  assert(stats_.expired == before || ConsistentLocked());
  return pages >= options_.pages_slice;
}

bool SessionTable::ExpireSlice() {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  return ExpireLocked();
}

void SessionTable::Expire() {
  while (ExpireSlice()) std::this_thread::yield();
}

SessionInfo SessionTable::InfoOf(const Session& session) const {
  SessionInfo info{.id = session.id,
                   .tenant = session.tenant,
                   .device = session.device,
                   .pinned = session.pinned};
  info.layers.reserve(session.layers.size());
  for (const Layer& layer : session.layers) info.layers.push_back(layer.shape);
  info.layer_lengths.resize(session.layers.size());
  Update(session, info);
  return info;
}

void SessionTable::Update(const Session& session, SessionInfo& info) const {
  const Pool& pool = pools_[session.device];
  info.length = session.length();
  info.lease_left = std::max(Duration::zero(), session.last_used + session.lease - clock_.Now());
  info.bytes = session.page_bytes;
  info.shared_bytes = 0;
  info.lost = pool.lost;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const Layer& layer = session.layers[n];
    info.layer_lengths[n] = layer.length;
    info.shared_bytes += SharedPages(*pool.pages, layer) * layer.layout.page_bytes;
  }
}

Status SessionTable::CheckLayers(int64_t layers) const {
  if (layers >= 1 && layers <= options_.layers_max) return Status();
  return InvalidArgument(OutOfBounds("layers", layers, 1, options_.layers_max));
}

Result<SessionInfo> SessionTable::Create(int tenant, const SessionSpec& spec,
                                         CacheRefusal* refusal) {
  const auto layers = std::ssize(spec.layers);
  ATTEND_RETURN_IF_ERROR(CheckLayers(layers));
  if (spec.lease < Duration::zero() || spec.lease > options_.lease_max) {
    const auto seconds = [](Duration d) {
      return std::chrono::duration_cast<std::chrono::seconds>(d).count();
    };
    return InvalidArgument(
        OutOfBounds("lease_seconds", seconds(spec.lease), 0, seconds(options_.lease_max)));
  }
  auto session = std::make_shared<Session>();
  for (int64_t n = 0; n < layers; ++n) {
    const LayerShape& shape = spec.layers[n];
    ATTEND_RETURN_IF_ERROR(CheckLayer(shape, n, options_.page_rows, options_.slab_bytes));
    session->layers.push_back({.shape = shape, .layout = LayoutOf(shape, options_.page_rows)});
  }
  Result<std::string> id = tokens_();
  if (!id.ok()) return id.status();
  session->id = *std::move(id);
  session->tenant = tenant;
  session->device = spec.device;
  session->lease = spec.lease == Duration::zero() ? options_.lease_default : spec.lease;
  session->pinned = spec.pinned;

  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  const Pool& pool = pools_[spec.device];
  if (pool.lost) return Unavailable("the device for the session is lost");
  if (pool.pages->stats().total_bytes == 0) {
    return Unimplemented("the device has no memory for sessions (session-memory)");
  }
  ATTEND_RETURN_IF_ERROR(TakePlace(*session, refusal));
  const TableUse more = {1, FixedBytes(layers)};
  ATTEND_RETURN_IF_ERROR(MakeRoom(tenant, more, spec.pinned ? more : TableUse()));
  SessionInfo info = Insert(session);
  assert(ConsistentLocked());
  return info;
}

Status SessionTable::Free(int tenant, const std::string& id) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  const SessionRef session = Look(tenant, id);
  if (session == nullptr) return NoSuchSession();
  Remove(session);
  assert(ConsistentLocked());
  return Status();
}

Result<SessionInfo> SessionTable::KeepAlive(int tenant, const std::string& id) {
  return Get(tenant, id);
}

Result<SessionInfo> SessionTable::Get(int tenant, const std::string& id) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  return InfoOf(**found);
}

SessionTable::Listed SessionTable::List(int tenant, const std::string& after, int64_t count_max) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Listed list;
  std::string last = after;
  while (ListSlice(tenant, count_max, last, list)) std::this_thread::yield();
  return list;
}

SessionTable::Range SessionTable::Of(int tenant) const {
  return {by_tenant_.lower_bound({tenant, {}}), by_tenant_.lower_bound({tenant + 1, {}})};
}

const Session* SessionTable::After(std::optional<int> tenant, const std::string& last) const {
  if (!tenant) {
    const auto next = sessions_.upper_bound(last);
    return next == sessions_.end() ? nullptr : next->second.get();
  }
  const auto next = by_tenant_.upper_bound({*tenant, last});
  return next == by_tenant_.end() || next->second->tenant != *tenant ? nullptr : next->second;
}

bool SessionTable::ListSlice(std::optional<int> tenant, int64_t count_max, std::string& last,
                             Listed& list) {
  const MutexLock lock(mutex_);
  ExpireLocked();
  int64_t looked = 0;
  while (const Session* const session = After(tenant, last)) {
    const auto listed = std::ssize(list.sessions);
    const auto layers = std::ssize(session->layers);
    list.more = listed >= count_max || (listed > 0 && layers > kListedLayersMax - list.layers);
    if (list.more) return false;
    if (looked >= kListSlice) return true;
    last = session->id;
    ++looked;
    if (Over(*session)) continue;
    list.sessions.push_back(InfoOf(*session));
    list.layers += layers;
    looked += layers;
  }
  return false;
}

void SessionTable::LoseDevice(int device) {
  const MutexLock lock(mutex_);
  pools_[device].lost = true;
}

SessionTable::Stats SessionTable::stats() const {
  const MutexLock lock(mutex_);
  Stats stats = stats_;
  stats.sessions = std::ssize(sessions_);
  return stats;
}

PagePool::Stats SessionTable::memory(int device) const {
  const MutexLock lock(mutex_);
  return pools_[device].pages->stats();
}

std::vector<int64_t> SessionTable::tenant_bytes(int device) const {
  const MutexLock lock(mutex_);
  return pools_[device].tenant_bytes;
}

int64_t SessionTable::table_bytes() const {
  const MutexLock lock(mutex_);
  return table_.bytes;
}

int SessionTable::ChooseDevice(const std::vector<bool>& healthy) const {
  const MutexLock lock(mutex_);
  int best = -1;
  int64_t most = -1;
  for (size_t n = 0; n < pools_.size() && n < healthy.size(); ++n) {
    const PagePool::Stats& stats = pools_[n].pages->stats();
    const int64_t left = stats.total_bytes - stats.used_bytes;
    if (!healthy[n] || stats.total_bytes == 0 || left <= most) continue;
    best = static_cast<int>(n);
    most = left;
  }
  return best;
}

}  // namespace attend
