// SPDX-License-Identifier: Apache-2.0
//
// All sessions, by id. An id belongs to the tenant that made the session; to others it does not
// exist. The table puts together what can be understood alone: a tree of pages for each device
// (page_tree.h), which also says what is evicted; when leases end (leases.h); and how many sessions
// and how large tables each tenant may have (server/memory/ledger.h). One lock is for all of them.
//
// A tenant may have a limit of its own (tenant_limits.h), which is to its sessions what the memory
// is to all: where its pages would be more, only its own idle ones are evicted.
//
//   Create, Fork --> idle <--1--> in use
//                     |              |
//                     2              3
//                     v              v
//                   ended <--4--- freed, in use
//
//   1  In use while it has a hold (cache_hold.h) or is being truncated. Nothing in use is evicted,
//      and nothing of a pinned session.
//   2  Free; or the lease is over. Its pages go, except those that others have too.
//   3  Free: it is not found any more. Its pages stay as long as they are read.
//   4  Its last use has ended.
//
// A lost device's sessions stay what they are, but to name one is UNAVAILABLE (except to free it)
// and renews no lease.
//
// Thread-safe. Nothing waits, except that Fork and Truncate copy a page of each layer, while the
// table is not locked.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/ledger.h"
#include "server/sessions/cache_hold.h"
#include "server/sessions/leases.h"
#include "server/sessions/page_tree.h"
#include "server/sessions/session.h"
#include "server/sessions/session_options.h"
#include "server/util/random_token.h"

namespace attend {

class SessionTable {
 public:
  struct Stats : EvictionStats {
    int64_t sessions = 0;
    int64_t created = 0;  // since the start, as are the rest; forks too
    int64_t expired = 0;
    int64_t evictions_operator = 0;
    std::vector<int64_t> appended_tokens = {};  // by tenant, of all layers
  };

  // `clock` must outlive the table.
  SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
               const std::vector<SessionDevice>& devices);
  ~SessionTable();
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  // Whether a session may have so many layers.
  Status CheckLayers(int64_t layers) const;
  // INVALID_ARGUMENT names the field, the value and the bound. RESOURCE_EXHAUSTED: there are as
  // many sessions as there may be. UNIMPLEMENTED: the device has no memory for sessions.
  Result<SessionInfo> Create(int tenant, const SessionSpec& spec);
  // A session of its own with the first `length` tokens (all, if not given), which shares full
  // pages. OUT_OF_RANGE beyond the session's length. FAILED_PRECONDITION: no length is given, and
  // the layers have different ones.
  Result<SessionInfo> Fork(int tenant, const std::string& id, std::optional<int64_t> length,
                           CacheRefusal* refusal = nullptr);
  // Layers that are longer keep `length` tokens. OUT_OF_RANGE beyond the longest; UNAVAILABLE: an
  // append or another truncation is under way; RESOURCE_EXHAUSTED: no memory for copies of pages
  // that others share.
  Result<SessionInfo> Truncate(int tenant, const std::string& id, int64_t length,
                               CacheRefusal* refusal = nullptr);
  // Also one whose device is lost.
  Status Free(int tenant, const std::string& id);
  // Renews the lease.
  Result<SessionInfo> KeepAlive(int tenant, const std::string& id);
  Result<SessionInfo> Get(int tenant, const std::string& id);
  // Most layers that one list describes; a session that has more is listed alone.
  static constexpr int64_t kListedLayersMax = 1024;
  struct Listed {
    std::vector<SessionInfo> sessions;
    int64_t layers = 0;  // of all of them
    bool more = false;   // it ends before the last session
  };
  // At most `count_max` of the tenant's, by id, from the first after `after` on.
  Listed List(int tenant, const std::string& after, int64_t count_max);
  // For an operator: sessions of all tenants. As List, of every tenant.
  Listed ListAll(const std::string& after, int64_t count_max);
  // Whether there was one with this id.
  bool FreeAny(const std::string& id);
  // Returns how many there were.
  int64_t FreeTenant(int tenant);
  // Takes all tokens of the tenant's sessions that are not in use; of pinned ones only if `pinned`.
  struct Evicted {
    int64_t sessions = 0;
    int64_t bytes = 0;  // that are free now
  };
  Evicted EvictTenant(int tenant, bool pinned);
  // How many sessions there are, by tenant.
  std::vector<int64_t> tenant_sessions() const;

  // Finds the caches for a request that appends `new_rows` rows to each, or only reads. All layers
  // must have the same shape, on one device. NOT_FOUND, INVALID_ARGUMENT; OUT_OF_RANGE: tokens were
  // evicted, and the message says how many are left; FAILED_PRECONDITION: the length is another;
  // UNAVAILABLE: another append is under way. INVALID_ARGUMENT also for what would never fit the
  // device's memory. `refusal` is told of lengths that are wrong.
  Result<std::unique_ptr<CacheHold>> Hold(int tenant, std::span<const CacheUse> uses,
                                          int64_t new_rows, CacheRefusal* refusal = nullptr);
  // For CacheHold, which describes them.
  Status Reserve(HeldCaches& hold, PageNumber* table, int64_t stride, CacheRefusal* refusal);
  void Commit(HeldCaches& hold);
  void End(HeldCaches& hold);

  // Frees sessions whose lease is over.
  void Expire();
  // The device is lost: its sessions end, and say so to those who name them until their leases end.
  void LoseDevice(int device);

  // Returns the healthy device with the most memory left for sessions; -1: none has any.
  int ChooseDevice(const std::vector<bool>& healthy) const;

  Stats stats() const;
  PageTree::Stats memory(int device) const;
  // The pages in use, by tenant.
  std::vector<int64_t> tenant_bytes(int device) const;
  // The bytes that count towards SessionOptions::table_bytes_max.
  int64_t table_bytes() const;
  // Whether everything adds up: each page is free, or one branch, hold or truncation has it, and
  // all sums are those of what is there. Debug builds ask after every change.
  bool Consistent() const;
  const SessionOptions& options() const { return options_; }

 private:
  using SessionRef = std::shared_ptr<Session>;
  struct Device {
    std::unique_ptr<PageTree> pages;
    DeviceArena* arena = nullptr;
    bool lost = false;
  };

  bool ConsistentLocked() const ATTEND_REQUIRES(mutex_);
  bool PagesAddUp() const ATTEND_REQUIRES(mutex_);
  bool SessionsAddUp() const ATTEND_REQUIRES(mutex_);
  bool UsesAddUp() const ATTEND_REQUIRES(mutex_);
  bool EndsAsItsLeaf(const Session& session) const ATTEND_REQUIRES(mutex_);
  PageTree& TreeOf(const Session& session) const ATTEND_REQUIRES(mutex_) {
    return *devices_[session.device].pages;
  }
  // Null: the tenant has none with this id. It is settled: it says what eviction has left of it.
  SessionRef Look(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  void Settle(Session& session) ATTEND_REQUIRES(mutex_);
  // To be used: its lease is renewed.
  Result<SessionRef> Find(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  SessionInfo InfoOf(const Session& session) const ATTEND_REQUIRES(mutex_);
  // Sets again what may have changed since InfoOf. Takes no memory.
  void Update(const Session& session, SessionInfo& info) const ATTEND_REQUIRES(mutex_);
  // The next of one tenant's sessions, or of all; null: there is none.
  Session* After(std::optional<int> tenant, const std::string& last) const ATTEND_REQUIRES(mutex_);
  // Lists more after `last`, which it moves on. Whether to go on.
  bool ListSlice(std::optional<int> tenant, int64_t count_max, std::string& last, Listed& list);
  void Touch(Session& session) ATTEND_REQUIRES(mutex_);
  // One use more, or less, of a session: while it has any, it neither expires nor loses pages.
  void Use(Session& session, int64_t more) ATTEND_REQUIRES(mutex_);
  int64_t UsedBytes() const ATTEND_REQUIRES(mutex_);  // on all devices
  int64_t PageCount(const Session& session) const ATTEND_REQUIRES(mutex_);
  SessionInfo Insert(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  void Remove(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  bool Over(const Session& session) const ATTEND_REQUIRES(mutex_) {
    return Leases::Over(session, clock_.Now());
  }
  // Whether there may be more.
  bool ExpireLocked() ATTEND_REQUIRES(mutex_);
  bool ExpireSlice();
  // For the tenant's sessions after `last`, which it moves on.
  bool FreeSlice(int tenant, std::string& last, int64_t& freed);
  bool EvictSlice(int tenant, bool pinned, std::string& last, Evicted& evicted);
  // Takes pages for a session, and evicts others for it. Nothing is evicted unless there may be
  // room for `later_bytes` too, the charge of pages that the caller takes next. `refusal` is told
  // what is missing for all of them.
  Status TakePages(const Session& session, int64_t page_bytes, int64_t count, int64_t later_bytes,
                   std::vector<PageNumber>& pages, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Makes room for them within the limit of its tenant.
  Status KeepLimit(const Session& session, int64_t bytes, CacheRefusal* refusal)
      ATTEND_REQUIRES(mutex_);
  // Whether the tenant may have one session more, of so many layers.
  Status CheckRoom(int tenant, int64_t layers) const ATTEND_REQUIRES(mutex_);
  // Whether its tables may have so many bytes more.
  Status CheckTables(int tenant, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  // A place among those that the tenant's limit allows.
  Status TakePlace(Session& session) ATTEND_REQUIRES(mutex_);

  // The page that a cut after `length` tokens goes through, of one layer.
  struct CutPage {
    size_t layer = 0;
    PageNumber from = 0;
    PageNumber to = 0;
  };
  struct Cut {
    SessionRef fork;  // null: the origin is truncated
    SessionRef origin;
    PageTree::Branch* leaf = nullptr;  // of the origin, pinned: what is copied stays
    DeviceArena* arena = nullptr;
    std::vector<CutPage> pages;
    std::vector<HostPiece> pieces;
  };
  void BeginCut(const SessionRef& origin, Cut& cut) ATTEND_REQUIRES(mutex_);
  void EndCut(Cut& cut) ATTEND_REQUIRES(mutex_);
  Status BeginFork(int tenant, const std::string& id, std::optional<int64_t> length, Cut& cut,
                   CacheRefusal* refusal);
  Status ForkLayers(int64_t length, Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  Result<SessionInfo> EndFork(Cut& cut, Status status);
  Status BeginTruncate(int tenant, const std::string& id, int64_t length, Cut& cut)
      ATTEND_REQUIRES(mutex_);
  Status CopyShared(int64_t length, Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // The layers that a cut copies a page of, by its bytes; takes what they are copied to.
  using CopyLayers = std::map<int64_t, std::vector<size_t>>;
  Status TakeCopies(const CopyLayers& layers, int64_t length, Cut& cut, CacheRefusal* refusal)
      ATTEND_REQUIRES(mutex_);
  void PlanCopies(int64_t length, Cut& cut) ATTEND_REQUIRES(mutex_);
  void CutLayers(int64_t length, Cut& cut) ATTEND_REQUIRES(mutex_);
  // `info` is the session's before the cut.
  Result<SessionInfo> EndTruncate(int64_t length, Cut& cut, Status status, SessionInfo& info)
      ATTEND_REQUIRES(mutex_);

  Status CheckUse(const CacheUse& use, int64_t index, const Session& session, int64_t new_rows,
                  bool& there) const ATTEND_REQUIRES(mutex_);
  Status CheckFits(const HeldCaches& hold) const ATTEND_REQUIRES(mutex_);
  Status FillHold(int tenant, int64_t new_rows, HeldCaches& hold) ATTEND_REQUIRES(mutex_);
  // Sets what `refusal` says of a request that ends with `status`.
  void Explain(const Status& status, int tenant, std::span<const CacheUse> uses,
               CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Whether the hold's sessions are still as it found them.
  Status CheckHold(HeldCaches& hold) ATTEND_REQUIRES(mutex_);
  Status TakeFor(HeldCaches& hold, PageNumber* table, int64_t stride, CacheRefusal* refusal)
      ATTEND_REQUIRES(mutex_);

  const SessionOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  mutable Mutex mutex_;
  Ledger places_ ATTEND_GUARDED_BY(mutex_);  // sessions, with those that are being forked left out
  Ledger tables_ ATTEND_GUARDED_BY(mutex_);  // bytes
  std::vector<Device> devices_ ATTEND_GUARDED_BY(mutex_);
  std::map<std::string, SessionRef> sessions_ ATTEND_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string_view>, Session*> by_tenant_ ATTEND_GUARDED_BY(mutex_);
  Leases leases_ ATTEND_GUARDED_BY(mutex_);
  // The holds and cuts that use sessions now.
  std::set<const HeldCaches*> holds_ ATTEND_GUARDED_BY(mutex_);
  std::set<const Cut*> cuts_ ATTEND_GUARDED_BY(mutex_);
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
