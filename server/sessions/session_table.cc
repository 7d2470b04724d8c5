// SPDX-License-Identifier: Apache-2.0
//
// Sessions come, are forked, cut and go; and the memory is taken from those that have it idle. What
// requests do with them is in cache_hold.cc.

#include "server/sessions/session_table.h"

#include <algorithm>
#include <cassert>
#include <numeric>

#include "kernels/contract/limits.h"
#include "server/memory/memory_reserve.h"

namespace attend {
namespace {

Status NoSuchSession() { return Status(Code::kNotFound, "session: there is none with this id"); }

std::string Bound(const std::string& field, int64_t value, int64_t low, int64_t high) {
  return field + " is " + std::to_string(value) + ", must be in [" + std::to_string(low) + ", " +
         std::to_string(high) + "]";
}

Status CheckLayer(const LayerShape& shape, int64_t index, int64_t page_rows, int64_t slab_bytes) {
  const std::string name = "layers[" + std::to_string(index) + "].";
  const auto check = [&](const char* field, int64_t value, int64_t high) {
    if (value >= 1 && value <= high) return Status();
    return InvalidArgument(Bound(name + field, value, 1, high));
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

}  // namespace

SessionTable::SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
                           const std::vector<SessionDevice>& devices)
    : options_(options), clock_(clock), tokens_(std::move(tokens)) {
  for (const SessionDevice& device : devices) {
    Pool pool;
    pool.arena = device.arena;
    const HostSpan memory = device.arena == nullptr ? HostSpan() : device.arena->memory();
    pool.pages = std::make_unique<PagePool>(memory, options.slab_bytes, device.on_free);
    pool.tenant_bytes.resize(options.tenant_weights.size());
    pools_.push_back(std::move(pool));
  }
}

SessionTable::~SessionTable() = default;

Result<SessionTable::SessionRef> SessionTable::Find(int tenant, const std::string& id) {
  ExpireLocked();
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second->tenant != tenant) return NoSuchSession();
  if (pools_[found->second->device].lost) {
    return Unavailable("session " + HexText(id) + " has ended: its device is lost");
  }
  Touch(*found->second);
  return found->second;
}

void SessionTable::Touch(Session& session) {
  Forget(session);
  session.last_used = clock_.Now();
  by_use_.insert({session.last_used, &session});
  by_lease_end_.insert({session.last_used + session.lease, &session});
}

void SessionTable::Forget(Session& session) {
  by_use_.erase({session.last_used, &session});
  by_lease_end_.erase({session.last_used + session.lease, &session});
}

void SessionTable::Insert(const SessionRef& session) {
  Touch(*session);
  sessions_.emplace(session->id, session);
  ++stats_.created;
}

void SessionTable::Remove(const SessionRef& session) {
  Forget(*session);
  sessions_.erase(session->id);
  for (Layer& layer : session->layers) Shorten(*session, layer, 0);
}

void SessionTable::ExpireLocked() {
  const TimePoint now = clock_.Now();
  std::vector<SessionRef> over;
  for (const auto& [end, session] : by_lease_end_) {
    if (end > now) break;
    if (session->in_use == 0) over.push_back(sessions_.at(session->id));
  }
  for (const SessionRef& session : over) {
    Remove(session);
    ++stats_.expired;
  }
}

void SessionTable::Expire() {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  ExpireLocked();
}

SessionInfo SessionTable::InfoOf(const Session& session) const {
  SessionInfo info{.id = session.id,
                   .device = session.device,
                   .length = session.length(),
                   .pinned = session.pinned};
  info.lease_left = std::max(Duration::zero(), session.last_used + session.lease - clock_.Now());
  const PagePool& pool = *pools_[session.device].pages;
  for (const Layer& layer : session.layers) {
    info.layers.push_back(layer.shape);
    info.layer_lengths.push_back(layer.length);
    info.bytes += std::ssize(layer.pages) * layer.layout.page_bytes;
    info.shared_bytes +=
        layer.layout.page_bytes *
        std::count_if(layer.pages.begin(), layer.pages.end(),
                      [&pool](PageNumber page) { return pool.references(page) > 1; });
  }
  return info;
}

Result<SessionInfo> SessionTable::Create(int tenant, const SessionSpec& spec) {
  const auto layers = std::ssize(spec.layers);
  if (layers < 1 || layers > options_.layers_max) {
    return InvalidArgument(Bound("layers", layers, 1, options_.layers_max));
  }
  if (spec.lease < Duration::zero() || spec.lease > options_.lease_max) {
    const auto seconds = [](Duration d) {
      return std::chrono::duration_cast<std::chrono::seconds>(d).count();
    };
    return InvalidArgument(
        Bound("lease in seconds", seconds(spec.lease), 0, seconds(options_.lease_max)));
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
  if (std::ssize(sessions_) >= options_.sessions_max) {
    return ResourceExhausted("there are " + std::to_string(sessions_.size()) +
                             " sessions, the limit");
  }
  Insert(session);
  return InfoOf(*session);
}

Result<SessionInfo> SessionTable::Fork(int tenant, const std::string& id,
                                       std::optional<int64_t> length) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Result<std::string> fork_id = tokens_();
  if (!fork_id.ok()) return fork_id.status();
  const MutexLock lock(mutex_);
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  const Session& origin = **found;
  const int64_t whole = origin.length();
  const int64_t cut = length.value_or(whole);
  if (cut < 0 || cut > whole) {
    return Status(Code::kOutOfRange, Bound("length", cut, 0, whole));
  }
  if (std::ssize(sessions_) >= options_.sessions_max) {
    return ResourceExhausted("there are " + std::to_string(sessions_.size()) +
                             " sessions, the limit");
  }
  auto fork = std::make_shared<Session>();
  fork->id = *std::move(fork_id);
  fork->tenant = origin.tenant;
  fork->device = origin.device;
  fork->lease = origin.lease;
  fork->pinned = origin.pinned;
  PagePool& pool = *pools_[origin.device].pages;
  // Full pages are shared; of the last one, which will be written to, a copy is made. All pages are
  // taken first, so that nothing has to be undone but this.
  const int64_t rows = options_.page_rows;
  std::vector<HostPiece> copies;
  Status status;
  ++(*found)->in_use;  // so that it is not evicted for its own fork
  for (const Layer& layer : origin.layers) {
    Layer& mine = fork->layers.emplace_back(
        Layer{.shape = layer.shape, .layout = layer.layout, .length = cut});
    mine.pages.assign(layer.pages.begin(), layer.pages.begin() + cut / rows);
    pool.AddReferences(mine.pages);
    if (!status.ok() || cut % rows == 0) continue;
    status = TakePages(*fork, layer.layout.page_bytes, 1, mine.pages);
    if (!status.ok()) continue;
    copies.push_back({pool.data(layer.pages[cut / rows]), pool.data(mine.pages.back()),
                      layer.layout.page_bytes});
  }
  --(*found)->in_use;
  if (status.ok()) status = CopyPages(origin.device, copies);
  if (!status.ok()) {
    for (Layer& layer : fork->layers) Shorten(*fork, layer, 0);
    return status;
  }
  Insert(fork);
  return InfoOf(*fork);
}

Status SessionTable::CopyPages(int device, std::span<const HostPiece> pieces) {
  return pieces.empty() ? Status() : pools_[device].arena->Copy(pieces);
}

Result<SessionInfo> SessionTable::Truncate(int tenant, const std::string& id, int64_t length) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  Session& session = **found;
  int64_t longest = 0;
  for (const Layer& layer : session.layers) longest = std::max(longest, layer.length);
  if (length < 0 || length > longest) {
    return Status(Code::kOutOfRange, Bound("length", length, 0, longest));
  }
  for (const Layer& layer : session.layers) {
    if (layer.changing) return Unavailable("session: an append to it is under way");
  }
  // The page that the cut goes through will be written to. If others read it, they keep it, and
  // this session gets a copy.
  PagePool& pool = *pools_[session.device].pages;
  const int64_t page = length / options_.page_rows;
  const auto is_shared = [&](const Layer& layer) {
    return length % options_.page_rows != 0 && length < layer.length &&
           pool.references(layer.pages[page]) > 1;
  };
  ++session.in_use;
  std::vector<std::pair<Layer*, PageNumber>> fresh;
  Status status;
  for (Layer& layer : session.layers) {
    if (!status.ok() || !is_shared(layer)) continue;
    std::vector<PageNumber> taken;
    status = TakePages(session, layer.layout.page_bytes, 1, taken);
    if (status.ok()) fresh.emplace_back(&layer, taken.front());
  }
  --session.in_use;
  std::vector<HostPiece> copies;
  for (const auto& [layer, copy] : fresh) {
    copies.push_back({pool.data(layer->pages[page]), pool.data(copy), layer->layout.page_bytes});
  }
  if (status.ok()) status = CopyPages(session.device, copies);
  for (auto& [layer, copy] : fresh) {
    if (status.ok()) std::swap(layer->pages[page], copy);
  }
  for (const auto& [layer, unused] : fresh) DropPages(session, *layer, {&unused, 1});
  if (!status.ok()) return status;
  for (Layer& layer : session.layers) {
    if (length < layer.length) Shorten(session, layer, length);
    layer.append_id.clear();
    layer.evicted_from = -1;
  }
  return InfoOf(session);
}

Status SessionTable::Free(int tenant, const std::string& id) {
  const OnNoMemory wait(OnNoMemory::kWait);
  const MutexLock lock(mutex_);
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  Remove(*found);
  return Status();
}

Result<SessionInfo> SessionTable::KeepAlive(int tenant, const std::string& id) {
  return Get(tenant, id);
}

Result<SessionInfo> SessionTable::Get(int tenant, const std::string& id) {
  const MutexLock lock(mutex_);
  Result<SessionRef> found = Find(tenant, id);
  if (!found.ok()) return found.status();
  return InfoOf(**found);
}

std::vector<SessionInfo> SessionTable::List(int tenant) {
  const MutexLock lock(mutex_);
  ExpireLocked();
  std::vector<SessionInfo> list;
  for (const auto& [id, session] : sessions_) {
    if (session->tenant == tenant) list.push_back(InfoOf(*session));
  }
  return list;
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

bool SessionTable::Consistent() const {
  const MutexLock lock(mutex_);
  for (const Pool& pool : pools_) {
    const int64_t sum =
        std::accumulate(pool.tenant_bytes.begin(), pool.tenant_bytes.end(), int64_t{0});
    if (!pool.pages->Consistent() || sum != pool.pages->stats().used_bytes) return false;
  }
  for (const auto& [id, session] : sessions_) {
    for (const Layer& layer : session->layers) {
      const int64_t pages = (layer.length + options_.page_rows - 1) / options_.page_rows;
      if (std::ssize(layer.pages) != pages) return false;
    }
  }
  return true;
}

}  // namespace attend
