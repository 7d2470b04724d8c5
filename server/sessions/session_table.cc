// SPDX-License-Identifier: Apache-2.0
//
// Creates, finds, lists and ends sessions. Forks and truncations are in session_cuts.cc, their use
// by requests in cache_hold.cc, the audit in session_audit.cc.

#include "server/sessions/session_table.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <new>
#include <thread>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"
#include "server/util/assign.h"

namespace attend {
namespace {

Status NoSuchSession() { return Status(Code::kNotFound, "session not found"); }

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

// The number of sessions, or layers of listed sessions, that a list visits before it releases the
// lock.
constexpr int64_t kListSlice = 1024;

// How much later a session is looked at again if its lease ends while it is in use.
constexpr std::chrono::seconds kLookInterval(1);

}  // namespace

SessionTable::SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
                           const std::vector<SessionDevice>& devices)
    : options_(options),
      clock_(clock),
      tokens_(std::move(tokens)),
      places_(options.sessions_max, options.tenant_weights),
      tables_(options.table_bytes_max, options.tenant_weights) {
  stats_.appended_tokens.resize(options.tenant_weights.size());
  for (const SessionDevice& device : devices) {
    const HostSpan memory = device.arena == nullptr ? HostSpan() : device.arena->memory();
    devices_.push_back({std::make_unique<PageTree>(memory, options.slab_bytes, device.on_free,
                                                   options.tenant_weights, tables_),
                        device.arena});
  }
}

SessionTable::~SessionTable() = default;

void SessionTable::Settle(Session& session) {
  PageTree::Branch& leaf = *session.leaf;
  TreeOf(session).Settle(leaf);
  for (size_t n = 0; n < session.layers.size(); ++n) {
    Layer& layer = session.layers[n];
    const int64_t left = PageTree::PagesOf(leaf, n) * options_.page_rows;
    if (layer.length <= left) continue;
    layer.length = layer.evicted_from = left;
    layer.append_id.clear();
  }
}

SessionTable::SessionRef SessionTable::Look(int tenant, const std::string& id) {
  const auto found = sessions_.find(id);
  const bool own = found != sessions_.end() && found->second->tenant == tenant;
  if (!own || Over(*found->second)) return nullptr;
  Settle(*found->second);
  return found->second;
}

Result<SessionTable::SessionRef> SessionTable::Find(int tenant, const std::string& id) {
  SessionRef session = Look(tenant, id);
  if (session == nullptr) return NoSuchSession();
  if (devices_[session->device].lost) {
    return Unavailable("session " + HexText(id) + " has ended: its device is lost");
  }
  Touch(*session);
  return session;
}

void SessionTable::Touch(Session& session) {
  const TimePoint now = clock_.Now();
  leases_.Renew(session, now);
  TreeOf(session).Touch(*session.leaf, now);
}

void SessionTable::Use(Session& session, int64_t more) {
  session.in_use += more;
  if (session.leaf == nullptr) return;
  TreeOf(session).Keep(*session.leaf, session.pinned || session.in_use > 0);
}

SessionInfo SessionTable::Insert(const SessionRef& session) {
  session->last_used = clock_.Now();
  SessionInfo info = InfoOf(*session);  // first, as it may throw
  const auto placed = sessions_.emplace(session->id, session).first;
  try {
    by_tenant_.emplace(std::pair(session->tenant, std::string_view(session->id)), session.get());
    leases_.Begin(*session, session->last_used);
  } catch (const std::bad_alloc&) {
    by_tenant_.erase({session->tenant, session->id});
    sessions_.erase(placed);
    throw;
  }
  ++stats_.created;
  places_.Add(session->tenant, 1);
  tables_.Add(session->tenant, FixedBytes(std::ssize(session->layers)));
  return info;
}

void SessionTable::Remove(const SessionRef& session) {
  leases_.End(*session);
  by_tenant_.erase({session->tenant, session->id});
  sessions_.erase(session->id);
  places_.Add(session->tenant, -1);
  tables_.Add(session->tenant, -FixedBytes(std::ssize(session->layers)));
  session->place.Release();
  TreeOf(*session).Leave(*std::exchange(session->leaf, nullptr));
}

int64_t SessionTable::PageCount(const Session& session) const {
  int64_t count = 0;
  for (size_t n = 0; n < session.layers.size(); ++n) count += PageTree::PagesOf(*session.leaf, n);
  return count;
}

bool SessionTable::ExpireLocked() {
  const TimePoint now = clock_.Now();
  [[maybe_unused]] const int64_t before = stats_.expired;
  int64_t pages = 0;
  for (Session* due = leases_.Due(now); due != nullptr && pages < options_.pages_slice;
       due = leases_.Due(now)) {
    if (due->in_use > 0) {
      leases_.LookAgain(*due, now + kLookInterval);
      continue;
    }
    pages += PageCount(*due) + std::ssize(due->layers);
    Remove(SessionRef(sessions_.at(due->id)));
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
  info.length = session.length();
  info.lease_left = std::max(Duration::zero(), session.last_used + session.lease - clock_.Now());
  info.bytes = info.shared_bytes = 0;
  info.lost = devices_[session.device].lost;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    const int64_t page_bytes = (*session.leaf->page_bytes)[n];
    info.layer_lengths[n] = session.layers[n].length;
    info.bytes += PageTree::PagesOf(*session.leaf, n) * page_bytes;
    // Pages before the leaf are shared with other sessions.
    info.shared_bytes += session.leaf->begin * page_bytes;
  }
}

Status SessionTable::CheckLayers(int64_t layers) const {
  if (layers >= 1 && layers <= options_.layers_max) return Status();
  return InvalidArgument(OutOfBounds("layers", layers, 1, options_.layers_max));
}

Result<SessionInfo> SessionTable::Create(int tenant, const SessionSpec& spec) {
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
  ATTEND_RETURN_IF_ERROR(Assign(session->id, tokens_()));
  session->tenant = tenant;
  session->device = spec.device;
  session->lease = spec.lease == Duration::zero() ? options_.lease_default : spec.lease;
  session->pinned = spec.pinned;

  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
  const Device& device = devices_[spec.device];
  if (device.lost) return Unavailable("the device for the session is lost");
  if (device.pages->stats().total_bytes == 0) {
    return Unimplemented("the device has no memory for sessions (session-memory)");
  }
  ATTEND_RETURN_IF_ERROR(TakePlace(*session));
  ATTEND_RETURN_IF_ERROR(CheckRoom(tenant, layers));
  auto page_bytes = std::make_shared<std::vector<int64_t>>();
  for (const Layer& layer : session->layers) {
    page_bytes->push_back(device.pages->Charge(layer.layout.page_bytes));
  }
  session->leaf = device.pages->Plant(tenant, std::move(page_bytes), spec.pinned, clock_.Now());
  try {
    SessionInfo info = Insert(session);
    assert(ConsistentLocked());
    return info;
  } catch (const std::bad_alloc&) {
    device.pages->Leave(*session->leaf);
    throw;
  }
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

Session* SessionTable::After(std::optional<int> tenant, const std::string& last) const {
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
  while (Session* const session = After(tenant, last)) {
    const auto listed = std::ssize(list.sessions);
    const auto layers = std::ssize(session->layers);
    list.more = listed >= count_max || (listed > 0 && layers > kListedLayersMax - list.layers);
    if (list.more) return false;
    if (looked >= kListSlice) return true;
    last = session->id;
    ++looked;
    if (Over(*session)) continue;
    Settle(*session);
    list.sessions.push_back(InfoOf(*session));
    list.layers += layers;
    looked += layers;
  }
  return false;
}

void SessionTable::LoseDevice(int device) {
  const MutexLock lock(mutex_);
  devices_[device].lost = true;
}

SessionTable::Stats SessionTable::stats() const {
  const MutexLock lock(mutex_);
  Stats stats = stats_;
  stats.sessions = std::ssize(sessions_);
  for (const Device& device : devices_) stats.Add(device.pages->evictions());
  return stats;
}

PageTree::Stats SessionTable::memory(int device) const {
  const MutexLock lock(mutex_);
  return devices_[device].pages->stats();
}

std::vector<int64_t> SessionTable::tenant_bytes(int device) const {
  const MutexLock lock(mutex_);
  const Ledger& ledger = devices_[device].pages->ledger();
  std::vector<int64_t> bytes;
  for (int tenant = 0; tenant < ledger.tenants(); ++tenant) bytes.push_back(ledger.held(tenant));
  return bytes;
}

int64_t SessionTable::table_bytes() const {
  const MutexLock lock(mutex_);
  return tables_.held();
}

int SessionTable::ChooseDevice(const std::vector<bool>& healthy) const {
  const MutexLock lock(mutex_);
  int best = -1;
  int64_t most = -1;
  for (size_t n = 0; n < devices_.size() && n < healthy.size(); ++n) {
    const PageTree::Stats stats = devices_[n].pages->stats();
    const int64_t left = stats.total_bytes - stats.used_bytes;
    if (!healthy[n] || stats.total_bytes == 0 || left <= most) continue;
    best = static_cast<int>(n);
    most = left;
  }
  return best;
}

}  // namespace attend
