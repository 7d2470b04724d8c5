// SPDX-License-Identifier: Apache-2.0
//
// All sessions, by id. An id belongs to the tenant that made the session; for other tenants it does
// not exist. The table combines independent parts: a tree of pages for each device, with eviction
// (page_tree.h); leases (leases.h); and the number of sessions and the table bytes of each tenant
// (server/memory/ledger.h). One lock guards all of them.
//
// A tenant may have a limit of its own (tenant_limits.h), which acts like a smaller memory: where
// its pages would exceed it, only its own idle ones are evicted.
//
//   Create, Fork --> idle <--1--> in use
//                     |              |
//                     2              3
//                     v              v
//                   ended <--4--- freed, in use
//
// 1  In use while it has a hold (cache_hold.h) or is being truncated. Nothing in use is evicted,
//    and nothing of a pinned session.
// 2  Free, or the lease has expired. Its pages are freed, except shared ones.
// 3  Free: it can no longer be found. Its pages stay while they are read.
// 4  Its last use has ended.
//
// Sessions of a lost device remain until their leases end, but naming one is UNAVAILABLE (except to
// free it) and renews no lease.
//
// Thread-safe. Nothing blocks, except that Fork, Truncate and KeepDraft copy pages of each layer
// without holding the lock.

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
    int64_t created = 0;  // since the start, like the following; includes forks
    int64_t expired = 0;
    int64_t evictions_operator = 0;
    std::vector<int64_t> appended_tokens = {};  // by tenant, summed over layers
  };

  // `clock` must outlive the table.
  SessionTable(const SessionOptions& options, const Clock& clock, TokenSource tokens,
               const std::vector<SessionDevice>& devices);
  ~SessionTable();
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  // Whether a session may have this many layers.
  Status CheckLayers(int64_t layers) const;
  // INVALID_ARGUMENT names the field, the value and the bound. RESOURCE_EXHAUSTED: too many
  // sessions. UNIMPLEMENTED: the device has no memory for sessions. UNAVAILABLE: the device is
  // lost.
  Result<SessionInfo> Create(int tenant, const SessionSpec& spec);
  // Makes a new session with the first `length` tokens (default: all), sharing full pages.
  // OUT_OF_RANGE: beyond the session's length. FAILED_PRECONDITION: no length is given and the
  // layers differ in length.
  Result<SessionInfo> Fork(int tenant, const std::string& id, std::optional<int64_t> length,
                           CacheRefusal* refusal = nullptr);
  // Shortens longer layers to `length` tokens. OUT_OF_RANGE: beyond the longest layer. UNAVAILABLE:
  // an append or another truncation is in progress. RESOURCE_EXHAUSTED: no memory to copy shared
  // pages.
  Result<SessionInfo> Truncate(int tenant, const std::string& id, int64_t length,
                               CacheRefusal* refusal = nullptr);
  // Truncates to `length` tokens and those that `kept` names, ascending and counted from `length`
  // on, of at most kTreeTokensMax. INVALID_ARGUMENT: `kept` is no such list. OUT_OF_RANGE: beyond
  // the session's length. FAILED_PRECONDITION: the layers differ in length. Otherwise as Truncate.
  // The same call again changes nothing.
  Result<SessionInfo> KeepDraft(int tenant, const std::string& id, int64_t length,
                                std::span<const int64_t> kept, CacheRefusal* refusal = nullptr);
  // Works for sessions of lost devices too.
  Status Free(int tenant, const std::string& id);
  // Renews the lease.
  Result<SessionInfo> KeepAlive(int tenant, const std::string& id);
  Result<SessionInfo> Get(int tenant, const std::string& id);
  // Maximum number of layers in one list; a session with more is listed alone.
  static constexpr int64_t kListedLayersMax = 1024;
  struct Listed {
    std::vector<SessionInfo> sessions;
    int64_t layers = 0;  // of all of these sessions
    bool more = false;   // more sessions follow
  };
  // At most `count_max` of the tenant's sessions, ordered by id, after the id `after`.
  Listed List(int tenant, const std::string& after, int64_t count_max);
  // For operators: like List, for all tenants.
  Listed ListAll(const std::string& after, int64_t count_max);
  // For operators. Returns whether the session existed.
  bool FreeAny(const std::string& id);
  // For operators. Returns the number of sessions freed.
  int64_t FreeTenant(int tenant);
  // For operators: evicts all tokens of the tenant's sessions that are not in use; pinned ones only
  // if `pinned`.
  struct Evicted {
    int64_t sessions = 0;
    int64_t bytes = 0;  // bytes freed
  };
  Evicted EvictTenant(int tenant, bool pinned);
  // The number of sessions, by tenant.
  std::vector<int64_t> tenant_sessions() const;

  // Finds the caches of a request that appends `new_rows` rows to each, or only reads. All layers
  // must have the same shape and be on one device. NOT_FOUND: no such session. INVALID_ARGUMENT: a
  // bad field, or an append that could never fit the device's memory. OUT_OF_RANGE: tokens were
  // evicted; the message says how many are left. FAILED_PRECONDITION: wrong length. UNAVAILABLE:
  // another append is in progress. For wrong lengths, `refusal` receives the right ones.
  Result<std::unique_ptr<CacheHold>> Hold(int tenant, std::span<const CacheUse> uses,
                                          int64_t new_rows, CacheRefusal* refusal = nullptr);
  // For CacheHold, which documents them.
  Status Reserve(HeldCaches& hold, PageNumber* table, int64_t stride, CacheRefusal* refusal);
  void Commit(HeldCaches& hold);
  void End(HeldCaches& hold);

  // Frees sessions whose leases have ended.
  void Expire();
  // Marks a device as lost: naming one of its sessions fails until its lease ends.
  void LoseDevice(int device);

  // The healthy device with the most free session memory; -1: no healthy device has session memory.
  int ChooseDevice(const std::vector<bool>& healthy) const;

  Stats stats() const;
  PageTree::Stats memory(int device) const;
  // Bytes charged for pages, by tenant.
  std::vector<int64_t> tenant_bytes(int device) const;
  // Bytes that count towards SessionOptions::table_bytes_max.
  int64_t table_bytes() const;
  // Whether the audit passes: each page is free, or belongs to exactly one branch, hold or
  // truncation, and all sums agree. Debug builds check it after every change.
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
  // Finds and settles a session (see Settle); null: the tenant has none with this id.
  SessionRef Look(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  // Shortens the layers to what eviction has left.
  void Settle(Session& session) ATTEND_REQUIRES(mutex_);
  // Finds a session for use: renews its lease.
  Result<SessionRef> Find(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  SessionInfo InfoOf(const Session& session) const ATTEND_REQUIRES(mutex_);
  // Refreshes what may have changed since InfoOf. Allocates nothing.
  void Update(const Session& session, SessionInfo& info) const ATTEND_REQUIRES(mutex_);
  // The next session of one tenant, or of all; null: none.
  Session* After(std::optional<int> tenant, const std::string& last) const ATTEND_REQUIRES(mutex_);
  // Lists sessions after `last` and advances it. Returns whether to continue.
  bool ListSlice(std::optional<int> tenant, int64_t count_max, std::string& last, Listed& list);
  void Touch(Session& session) ATTEND_REQUIRES(mutex_);
  // Adds `more` (1 or -1) to the use count. A session in use neither expires nor loses pages.
  void Use(Session& session, int64_t more) ATTEND_REQUIRES(mutex_);
  int64_t UsedBytes() const ATTEND_REQUIRES(mutex_);  // on all devices
  int64_t PageCount(const Session& session) const ATTEND_REQUIRES(mutex_);
  SessionInfo Insert(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  void Remove(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  bool Over(const Session& session) const ATTEND_REQUIRES(mutex_) {
    return Leases::Over(session, clock_.Now());
  }
  // Returns whether more sessions may be due.
  bool ExpireLocked() ATTEND_REQUIRES(mutex_);
  bool ExpireSlice();
  // Process one slice of the tenant's sessions after `last`, and advance it. Return whether to
  // continue.
  bool FreeSlice(int tenant, std::string& last, int64_t& freed);
  bool EvictSlice(int tenant, bool pinned, std::string& last, Evicted& evicted);
  // Takes pages for a session, evicting others as needed. Evicts nothing unless `later_bytes`, the
  // charge of pages the caller takes next, could fit too. `refusal` receives the bytes missing for
  // all of them.
  Status TakePages(const Session& session, int64_t page_bytes, int64_t count, int64_t later_bytes,
                   std::vector<PageNumber>& pages, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Makes room within the tenant's own limit.
  Status KeepLimit(const Session& session, int64_t bytes, CacheRefusal* refusal)
      ATTEND_REQUIRES(mutex_);
  // Whether the tenant may have another session of that many layers.
  Status CheckRoom(int tenant, int64_t layers) const ATTEND_REQUIRES(mutex_);
  // Whether the tenant's tables may grow by `bytes`.
  Status CheckTables(int tenant, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  // Takes a place within the tenant's limit of sessions.
  Status TakePlace(Session& session) ATTEND_REQUIRES(mutex_);

  // A layer's pages from the cut on that are copied, and their copies.
  struct CutLayer {
    size_t layer = 0;
    std::vector<PageNumber> from = {};
    std::vector<PageNumber> to = {};
  };
  struct Cut {
    SessionRef fork = {};  // null: the origin is truncated
    SessionRef origin = {};
    PageTree::Branch* leaf = nullptr;  // of the origin; pinned, so that the source pages stay
    DeviceArena* arena = nullptr;
    int64_t length = 0;               // tokens that stay in their place
    std::vector<int64_t> moved = {};  // positions of the tokens that follow them then, ascending
    std::vector<CutLayer> layers = {};
    int64_t draft_begin = 0;  // the tokens before a kept draft
    uint64_t draft = 0;       // tells KeepDraft's arguments apart; 0: a truncation

    int64_t end() const { return length + std::ssize(moved); }
  };
  void BeginCut(const SessionRef& origin, Cut& cut) ATTEND_REQUIRES(mutex_);
  void EndCut(Cut& cut) ATTEND_REQUIRES(mutex_);
  Status BeginFork(int tenant, const std::string& id, std::optional<int64_t> length, Cut& cut,
                   CacheRefusal* refusal);
  Status ForkLayers(Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  Result<SessionInfo> EndFork(Cut& cut, Status status);
  // Truncates the session as `cut` says.
  Result<SessionInfo> Shorten(int tenant, const std::string& id, Cut& cut, CacheRefusal* refusal);
  Status BeginTruncate(int tenant, const std::string& id, Cut& cut) ATTEND_REQUIRES(mutex_);
  Status CheckDraft(const Session& session, Cut& cut) const ATTEND_REQUIRES(mutex_);
  Status CopyShared(Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // The layers of which a cut copies pages, by page size. TakeCopies takes the destination pages.
  using CopyLayers = std::map<int64_t, std::vector<size_t>>;
  Status TakeCopies(const CopyLayers& layers, Cut& cut, CacheRefusal* refusal)
      ATTEND_REQUIRES(mutex_);
  int64_t CopiedPages(const Cut& cut) const;  // of each layer
  // Copies the tokens that the copied pages have then. Without the lock.
  Status CopyTokens(const Cut& cut) const;
  void AddPieces(const Cut& cut, const CutLayer& layer, int64_t begin, int64_t end,
                 std::vector<HostPiece>& pieces) const;
  void CutLayers(Cut& cut) ATTEND_REQUIRES(mutex_);
  // `info` describes the session before the cut.
  Result<SessionInfo> EndTruncate(Cut& cut, Status status, SessionInfo& info)
      ATTEND_REQUIRES(mutex_);

  Status CheckUse(const CacheUse& use, int64_t index, const Session& session, int64_t new_rows,
                  bool& there) const ATTEND_REQUIRES(mutex_);
  Status CheckFits(const HeldCaches& hold) const ATTEND_REQUIRES(mutex_);
  Status FillHold(int tenant, int64_t new_rows, HeldCaches& hold) ATTEND_REQUIRES(mutex_);
  // Fills `refusal` for a request that ends with `status`.
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
  Ledger places_ ATTEND_GUARDED_BY(mutex_);  // sessions, without forks in progress
  Ledger tables_ ATTEND_GUARDED_BY(mutex_);  // table bytes
  std::vector<Device> devices_ ATTEND_GUARDED_BY(mutex_);
  std::map<std::string, SessionRef> sessions_ ATTEND_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string_view>, Session*> by_tenant_ ATTEND_GUARDED_BY(mutex_);
  Leases leases_ ATTEND_GUARDED_BY(mutex_);
  // Holds and cuts that are using sessions.
  std::set<const HeldCaches*> holds_ ATTEND_GUARDED_BY(mutex_);
  std::set<const Cut*> cuts_ ATTEND_GUARDED_BY(mutex_);
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
