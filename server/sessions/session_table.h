// SPDX-License-Identifier: Apache-2.0
//
// All sessions, by id, and the memory that their pages are in. An id belongs to the tenant that
// made the session; to others it does not exist.
//
// A request that reads or appends to sessions takes a CacheHold, which keeps their pages until the
// request has ended: nothing of them is evicted, and what is truncated or freed meanwhile stays
// where the request reads it. An append reserves its pages first, and its rows count only once the
// hold is committed, those of all sequences at once.
//
// Memory: when it is full, sessions that nobody uses lose their tails, the one that was used
// longest ago first: sessions of the tenant that needs memory, and of tenants that have more than
// their share. A pinned session loses nothing while its lease lasts. A lease begins anew with every
// use; at its end the session is freed.
//
// Thread-safe. Nothing waits, except that Fork and Truncate copy a page of each layer.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/sessions/page_pool.h"
#include "server/sessions/session.h"
#include "server/util/clock.h"
#include "server/util/random_token.h"

namespace attend {

// Memory for sessions on one device.
struct SessionDevice {
  DeviceArena* arena = nullptr;  // null: this device has no sessions
  // Called with each page that becomes free; may be empty.
  std::function<void(char* data, int64_t bytes)> on_free;
};

struct SessionOptions {
  int64_t page_rows = 64;
  int64_t slab_bytes = int64_t{8} << 20;
  int64_t sessions_max = 65536;
  int64_t layers_max = 512;  // of one session
  Duration lease_default = std::chrono::seconds(60);
  Duration lease_max = std::chrono::hours(24);
  std::vector<int32_t> tenant_weights = {1};  // a tenant's share of the memory is by its weight
};

struct SessionSpec {
  int device = 0;
  std::vector<LayerShape> layers;
  Duration lease{};  // zero: the default
  bool pinned = false;
};

struct SessionInfo {
  std::string id;
  int device = 0;
  int64_t length = 0;  // of the shortest layer
  std::vector<LayerShape> layers = {};
  std::vector<int64_t> layer_lengths = {};
  Duration lease_left{};
  bool pinned = false;
  int64_t bytes = 0;         // of its pages
  int64_t shared_bytes = 0;  // of those that others refer to as well
};

// What one sequence of a request uses.
struct CacheUse {
  std::string session;
  int64_t layer = 0;
  int64_t length = 0;     // that the client believes the layer has
  std::string append_id;  // chosen by the client; empty: an append cannot be asked for again
};

class SessionTable;

// A request's hold of the caches that it uses. Ends without appending anything unless it was
// committed; either way the pages stay as they are until it ends. The table must outlive it.
class CacheHold {
 public:
  struct Sequence {
    std::span<const PageNumber> pages;
    int64_t length = 0;  // with what is appended
  };

  ~CacheHold();
  CacheHold(const CacheHold&) = delete;
  CacheHold& operator=(const CacheHold&) = delete;

  int device() const { return device_; }
  // That the pages are in: page n begins at base() + n * kPageUnitBytes.
  DeviceArena& arena() const { return *arena_; }
  char* base() const { return static_cast<char*>(arena_->memory().data); }
  const LayerShape& shape() const { return shape_; }
  const PageLayout& layout() const { return layout_; }
  const std::vector<Sequence>& sequences() const { return sequences_; }
  // New rows at the end of every sequence that the request has to write; 0 if it brought none, or
  // if an earlier request with the same append id has written them.
  int64_t append_rows() const { return append_rows_; }
  // Of the longest sequence.
  int64_t length_max() const;
  // Moves the sequences' page numbers to a table of the caller's, `stride` entries for each, which
  // must outlive the hold: long tables are then counted with the request's memory. What is left of
  // a sequence's entries becomes 0.
  void MovePages(PageNumber* table, int64_t stride);
  // The rows have been written: from now on they are the sessions'. Once, before End.
  void Commit();
  // The pages are not read any more. What the hold says stays. Also when it is destroyed.
  void End();

 private:
  friend class SessionTable;
  explicit CacheHold(SessionTable& table) : table_(table) {}

  SessionTable& table_;
  int device_ = 0;
  DeviceArena* arena_ = nullptr;
  LayerShape shape_;
  PageLayout layout_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<PageNumber>> pages_;  // of the sequences, until MovePages
  int64_t append_rows_ = 0;
  bool committed_ = false;
  std::vector<CacheUse> uses_;
  std::vector<std::shared_ptr<Session>> sessions_;
};

class SessionTable {
 public:
  enum class End { kFreed, kLease, kDeviceLost };
  struct Stats {
    int64_t sessions = 0;
    int64_t created = 0;  // since the start, as are the rest; forks too
    int64_t expired = 0;
    int64_t evictions_own = 0;     // for the tenant's own needs
    int64_t evictions_others = 0;  // for others', of what exceeded the tenant's share
    int64_t evicted_bytes = 0;
    double evicted_idle_seconds = 0;  // sum over evictions
    int64_t appended_tokens = 0;      // of all layers
  };

  // `clock` must outlive the table.
  SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
               const std::vector<SessionDevice>& devices);
  ~SessionTable();
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  // INVALID_ARGUMENT names the field, the value and the bound. RESOURCE_EXHAUSTED: there are as
  // many sessions as there may be. UNIMPLEMENTED: the device has no memory for sessions.
  Result<SessionInfo> Create(int tenant, const SessionSpec& spec);
  // A session of its own with the first `length` tokens (all, if not given), which shares full
  // pages. OUT_OF_RANGE beyond the session's length.
  Result<SessionInfo> Fork(int tenant, const std::string& id, std::optional<int64_t> length);
  // Layers that are longer keep `length` tokens.
  Result<SessionInfo> Truncate(int tenant, const std::string& id, int64_t length);
  Status Free(int tenant, const std::string& id);
  // Begins the lease anew.
  Result<SessionInfo> KeepAlive(int tenant, const std::string& id);
  Result<SessionInfo> Get(int tenant, const std::string& id);
  std::vector<SessionInfo> List(int tenant);

  // Holds the caches for a request that appends `new_rows` rows to each, or only reads. All layers
  // must have the same shape, on one device. NOT_FOUND, INVALID_ARGUMENT; OUT_OF_RANGE: tokens were
  // evicted, and the message says how many are left; FAILED_PRECONDITION: the length is another;
  // UNAVAILABLE: another append is under way; RESOURCE_EXHAUSTED: there is no memory.
  Result<std::unique_ptr<CacheHold>> Hold(int tenant, std::span<const CacheUse> uses,
                                          int64_t new_rows);

  // Frees sessions whose lease is over.
  void Expire();
  // The device is lost: its sessions end, and say so to those who name them until their leases end.
  void LoseDevice(int device);

  Stats stats() const;
  PagePool::Stats memory(int device) const;
  // Of pages in use, by tenant.
  std::vector<int64_t> tenant_bytes(int device) const;
  // Whether the pools are consistent, and the tenants' sums are those of the pools. For tests.
  bool Consistent() const;
  const SessionOptions& options() const { return options_; }

 private:
  friend class CacheHold;
  using SessionRef = std::shared_ptr<Session>;
  struct Pool {
    std::unique_ptr<PagePool> pages;
    DeviceArena* arena = nullptr;
    std::vector<int64_t> tenant_bytes;
    bool lost = false;
  };

  Result<SessionRef> Find(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  SessionInfo InfoOf(const Session& session) const ATTEND_REQUIRES(mutex_);
  // Its last use is now; it is filed under that, or (Forget) no longer filed.
  void Touch(Session& session) ATTEND_REQUIRES(mutex_);
  void Forget(Session& session) ATTEND_REQUIRES(mutex_);
  void Insert(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  void Remove(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  void ExpireLocked() ATTEND_REQUIRES(mutex_);
  void DropPages(const Session& session, const Layer& layer, std::span<const PageNumber> pages)
      ATTEND_REQUIRES(mutex_);
  // Takes pages, and evicts others' for it.
  Status TakePages(const Session& session, int64_t page_bytes, int64_t count,
                   std::vector<PageNumber>& pages) ATTEND_REQUIRES(mutex_);
  bool MayEvict(const Session& session, const Session& needy) const ATTEND_REQUIRES(mutex_);
  void EvictTail(Session& session, const Session& needy, int64_t page_bytes, int64_t count)
      ATTEND_REQUIRES(mutex_);
  void Shorten(Session& session, Layer& layer, int64_t length) ATTEND_REQUIRES(mutex_);
  Status CopyPages(int device, std::span<const HostPiece> pieces) ATTEND_REQUIRES(mutex_);
  Status CheckUse(const CacheUse& use, int64_t index, const Session& session, int64_t new_rows,
                  bool& there) const ATTEND_REQUIRES(mutex_);
  Status FillHold(int tenant, int64_t new_rows, CacheHold& hold) ATTEND_REQUIRES(mutex_);
  Status TakeAppends(CacheHold& hold, std::vector<SessionRef> sessions) ATTEND_REQUIRES(mutex_);
  void CommitHold(CacheHold& hold);
  void EndHold(CacheHold& hold);

  const SessionOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  mutable Mutex mutex_;
  std::vector<Pool> pools_ ATTEND_GUARDED_BY(mutex_);
  std::unordered_map<std::string, SessionRef> sessions_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::pair<TimePoint, Session*>> by_use_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::pair<TimePoint, Session*>> by_lease_end_ ATTEND_GUARDED_BY(mutex_);
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
