// SPDX-License-Identifier: Apache-2.0
//
// All sessions, by id, and the memory that their pages are in. An id belongs to the tenant that
// made the session; to others it does not exist.
//
// Memory: when it is full, sessions that nobody uses lose their tails, the one that was used
// longest ago first: sessions of the tenant that needs memory, and of tenants that have more than
// their share, but not what is within it. If all of them together could not cover the need of who
// goes beyond its share, and would without its idle sessions, nothing is evicted; pages that they
// share count for each of them. A pinned session loses nothing while its lease lasts; no tenant's
// pinned sessions grow beyond its share. The number of sessions and the memory of the tables are
// shared out in the same way. Every use renews the lease; at its end the session is freed. A tenant
// may have a limit of its own (tenant_limits.h), which is to its sessions what the memory is to
// all.
//
//   Create, Fork --> idle <--1--> in use
//                     |              |
//                     2              3
//                     v              v
//                   ended <--4--- freed, in use
//
//   1  In use while it has a hold (cache_hold.h) or is being truncated. A hold of a request whose
//      bytes still arrive may have to give way to another tenant, if nobody idle can. A session in
//      use loses tokens to eviction only for a tenant within its share, and where nothing else is
//      enough; its pages go when those that read them have ended.
//   2  Free; the lease is over; or, unless it is pinned, it makes room for another tenant's session
//      or page list (max-sessions, memory-budget). Its pages go, but for those that others refer
//      to.
//   3  Free, or to make room where no idle session could: nobody finds it any more. Layers that are
//      read keep their pages, the others lose them.
//   4  Its last use has ended, and each layer's pages went with the layer's last reader.
//
// A lost device's sessions stay what they are, but to name one is UNAVAILABLE (except to free it)
// and renews no lease.
//
// Thread-safe. Nothing waits, except that Fork and Truncate copy a page of each layer, while the
// table is not locked.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/sessions/cache_hold.h"
#include "server/sessions/page_pool.h"
#include "server/sessions/session.h"
#include "server/sessions/session_options.h"
#include "server/util/random_token.h"

namespace attend {

class SessionTable {
 public:
  // The buckets of the histogram of how long sessions had not been used when they lost tokens.
  static constexpr std::array<double, 10> kIdleBoundsSeconds = {0.1, 1,   5,   10,   30,
                                                                60,  300, 900, 3600, 21600};
  struct Stats {
    int64_t sessions = 0;
    int64_t created = 0;  // since the start, as are the rest; forks too
    int64_t expired = 0;
    int64_t displaced = 0;         // ended for another tenant's
    int64_t gave_way = 0;          // holds of requests whose bytes still arrived
    int64_t evictions_own = 0;     // for the tenant's own needs
    int64_t evictions_others = 0;  // for others', of what exceeded the tenant's share
    int64_t evictions_operator = 0;
    int64_t evicted_bytes = 0;
    double evicted_idle_seconds = 0;  // sum over evictions
    // Up to each of kIdleBoundsSeconds, but no lower one; the last is beyond them.
    std::array<int64_t, kIdleBoundsSeconds.size() + 1> evictions_by_idle = {};
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
  Result<SessionInfo> Create(int tenant, const SessionSpec& spec, CacheRefusal* refusal = nullptr);
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
  // For an operator, whoever's they are. As List, of every tenant.
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

  // Frees sessions whose lease is over.
  void Expire();
  // The device is lost: its sessions end, and say so to those who name them until their leases end.
  void LoseDevice(int device);

  // Returns the healthy device with the most memory left for sessions; -1: none has any.
  int ChooseDevice(const std::vector<bool>& healthy) const;

  Stats stats() const;
  PagePool::Stats memory(int device) const;
  // The pages in use, by tenant.
  std::vector<int64_t> tenant_bytes(int device) const;
  // What counts towards SessionOptions::table_bytes_max.
  int64_t table_bytes() const;
  // Whether everything adds up: each page is free or has as many references as sessions, holds,
  // forks and truncations have to it, and all sums are those of what is there. Debug builds ask
  // after every change.
  bool Consistent() const;
  const SessionOptions& options() const { return options_; }

 private:
  friend class CacheHold;
  using SessionRef = std::shared_ptr<Session>;
  // Room that is being made for a tenant within its share.
  struct TenantClaim {
    int64_t bytes = 0;
    TimePoint until = {};
  };
  struct Pool {
    std::unique_ptr<PagePool> pages;
    DeviceArena* arena = nullptr;
    std::vector<int64_t> tenant_bytes;
    std::vector<int64_t> tenant_coming;  // of these, of pages that are coming back
    std::vector<TenantClaim> claims;     // by tenant
    bool lost = false;
  };

  bool ConsistentLocked() const ATTEND_REQUIRES(mutex_);
  struct References;
  bool PagesAddUp() const ATTEND_REQUIRES(mutex_);
  bool SharedAlike() const ATTEND_REQUIRES(mutex_);
  bool SessionsAddUp() const ATTEND_REQUIRES(mutex_);
  bool UsesAddUp() const ATTEND_REQUIRES(mutex_);
  // Also those that were freed while requests use them.
  std::set<const Session*> AllInUse() const ATTEND_REQUIRES(mutex_);
  // Null: the tenant has none with this id.
  SessionRef Look(int tenant, const std::string& id) const ATTEND_REQUIRES(mutex_);
  // To be used: its lease is renewed.
  Result<SessionRef> Find(int tenant, const std::string& id) ATTEND_REQUIRES(mutex_);
  SessionInfo InfoOf(const Session& session) const ATTEND_REQUIRES(mutex_);
  // What may have changed since InfoOf. Takes no memory.
  void Update(const Session& session, SessionInfo& info) const ATTEND_REQUIRES(mutex_);
  // The next of one tenant's sessions, or of all; null: there is none.
  const Session* After(std::optional<int> tenant, const std::string& last) const
      ATTEND_REQUIRES(mutex_);
  // Lists more after `last`, which it moves on. Whether to go on.
  bool ListSlice(std::optional<int> tenant, int64_t count_max, std::string& last, Listed& list);
  using ByTenant = std::map<std::pair<int, std::string_view>, Session*>;
  using Range = std::pair<ByTenant::const_iterator, ByTenant::const_iterator>;
  Range Of(int tenant) const ATTEND_REQUIRES(mutex_);
  // Its last use is now; it is filed under that, or (Forget) no longer filed. Touch allocates
  // nothing for a session that is filed.
  void Touch(Session& session) ATTEND_REQUIRES(mutex_);
  void Forget(Session& session) ATTEND_REQUIRES(mutex_);
  // To see then whether its lease has ended.
  void LookAgain(Session& session, TimePoint when) ATTEND_REQUIRES(mutex_);
  int64_t UsedBytes() const ATTEND_REQUIRES(mutex_);  // on all devices
  SessionInfo Insert(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  void Remove(const SessionRef& session) ATTEND_REQUIRES(mutex_);
  // Its lease has ended, and it has not been freed yet.
  bool Over(const Session& session) const ATTEND_REQUIRES(mutex_);
  // Whether there may be more.
  bool ExpireLocked() ATTEND_REQUIRES(mutex_);
  bool ExpireSlice();
  // Of the tenant's sessions after `last`, which it moves on.
  bool FreeSlice(int tenant, std::string& last, int64_t& freed);
  bool EvictSlice(int tenant, bool pinned, std::string& last, Evicted& evicted);
  // `leaving`: LeavePages was called for these references, as nothing but requests that run needs
  // them.
  void DropPages(const Session& session, const Layer& layer, std::span<const PageNumber> pages,
                 bool leaving = false) ATTEND_REQUIRES(mutex_);
  void LeavePages(const Session& session, const Layer& layer, std::span<const PageNumber> pages)
      ATTEND_REQUIRES(mutex_);
  // Takes pages, and evicts others' for it. `refusal` is told what is missing.
  Status TakePages(const Session& session, int64_t page_bytes, int64_t count,
                   std::vector<PageNumber>& pages, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Pages that a session needs.
  struct Need {
    const Session& session;
    int64_t page_bytes = 0;
    int64_t bytes = 0;  // of all pages
  };
  // Whose sessions lose pages: the needy tenant's idle ones; others' idle ones too, of what those
  // have beyond their share; or, for who stays within its own share, also those that requests of
  // others use: their pages come back when these have ended.
  enum class From { kOwn, kIdle, kRunning };
  // How many bytes are still to be evicted; 0 or less: it is enough. Called with the lock held.
  using Missing = std::function<int64_t()>;
  int64_t BeyondShare(int device, int tenant) const ATTEND_REQUIRES(mutex_);
  // Whether the needy tenant has no more than its share with what it needs.
  bool WithinShare(const Need& need) const ATTEND_REQUIRES(mutex_);
  // Of pages that come back when running requests have ended, what tenants have beyond their
  // shares.
  int64_t ComingBytes(int device) const ATTEND_REQUIRES(mutex_);
  // What the tenant has beyond its share, and all that is the needy one's own.
  int64_t MayLoseBytes(int tenant, const Need& need) const ATTEND_REQUIRES(mutex_);
  bool MayLose(const Session& session, const Need& need, From from) const ATTEND_REQUIRES(mutex_);
  // Whether idle sessions may be enough for it and what others claim, or its own for it to be
  // within its share.
  bool EnoughToEvict(const Need& need, int64_t claims) const ATTEND_REQUIRES(mutex_);
  // Requests of tenants beyond their share let go if their bytes still arrive, the longest first.
  void GiveWay(const Need& need, const Missing& missing) ATTEND_REQUIRES(mutex_);
  // Evicts until it is enough, or nothing is left that may go: first pages that nobody shares.
  void Evict(const Need& need, From from, const Missing& missing) ATTEND_REQUIRES(mutex_);
  // `sessions`, sorted by their pages, may all lose what the one at `at` loses.
  void EvictTail(std::span<Session* const> sessions, size_t at, const Need& need, From from,
                 const Missing& missing) ATTEND_REQUIRES(mutex_);
  // The same for `columns` pages of each layer at most, and at once: from all sessions whose pages
  // are the first ones of its own. Returns how many went of each layer.
  int64_t EvictAlike(std::span<Session* const> sessions, size_t at, From from, int64_t columns)
      ATTEND_REQUIRES(mutex_);
  // What comes back if all of these lose their pages of the n-th layer that begin after `length`
  // tokens, one of each.
  int64_t GainOf(std::span<Session* const> losers, size_t n, int64_t length, From from) const
      ATTEND_REQUIRES(mutex_);
  // The layers from the first one on are cut to `length` tokens; what is read stays until it has
  // been read. All or none.
  void EvictPages(std::span<Session* const> losers, size_t first_layer, int64_t length)
      ATTEND_REQUIRES(mutex_);
  // The n-th layer of those that have pages from the `begin`-th on, some of `tail`, loses them.
  // `ends` has room for one count more than these. What may fail has been done.
  void CutTails(std::span<Session* const> losers, size_t n, int64_t begin,
                std::span<const PageNumber> tail, std::span<int64_t> ends) ATTEND_REQUIRES(mutex_);
  // What is appended to that layer now will not be the session's.
  void DoomAppend(const Session& session, Layer& layer) ATTEND_REQUIRES(mutex_);
  // Keeps room for the need's tenant, which asks again.
  void Claim(const Need& need) ATTEND_REQUIRES(mutex_);
  int64_t ClaimsOfOthers(const Need& need) const ATTEND_REQUIRES(mutex_);
  // Makes room for the need within the limit of its tenant.
  Status KeepLimit(const Need& need, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Cuts the layer to `length` tokens. Its other pages are freed, and nobody may read the layer; or
  // `cut`, which has room for them, gets the pages.
  void Shorten(Session& session, Layer& layer, int64_t length,
               std::vector<PageNumber>* cut = nullptr) ATTEND_REQUIRES(mutex_);
  void EndRead(Session& session, Layer& layer, Readers& readers) ATTEND_REQUIRES(mutex_);
  // The page that a cut after `length` tokens goes through, of one layer.
  struct CutPage {
    size_t layer = 0;
    PageNumber from = 0;  // to which a fork refers until it is copied
    PageNumber to = 0;
  };
  struct Cut {
    SessionRef fork;  // null: the origin is truncated
    SessionRef origin;
    DeviceArena* arena = nullptr;
    std::vector<CutPage> pages;
    std::vector<HostPiece> pieces;
    std::vector<std::list<Readers>> room;  // of a truncation: for what it cuts, by layer
  };
  // While this lives the session is neither evicted nor expired.
  struct InUse {
    explicit InUse(Session& session) : session_(session) { ++session_.in_use; }
    ~InUse() { --session_.in_use; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Session& session_;
  };
  void AddToCut(size_t layer, PageNumber to, int64_t length, Cut& cut) ATTEND_REQUIRES(mutex_);
  void DropCut(Cut& cut) ATTEND_REQUIRES(mutex_);
  Status BeginFork(int tenant, const std::string& id, std::optional<int64_t> length, Cut& cut,
                   CacheRefusal* refusal);
  Status ForkLayers(int64_t length, Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  Result<SessionInfo> EndFork(Cut& cut, Status status);
  Status BeginTruncate(int tenant, const std::string& id, int64_t length, Cut& cut)
      ATTEND_REQUIRES(mutex_);
  Status CopyShared(int64_t length, Cut& cut, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // The layers that a cut copies a page of, by its bytes; takes what they are copied to.
  using CopyLayers = std::map<int64_t, std::vector<size_t>>;
  Status TakeCopies(const Session& session, const CopyLayers& layers, int64_t length, Cut& cut,
                    CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  void PlanCopies(int64_t length, Cut& cut) ATTEND_REQUIRES(mutex_);
  // `info` is the session's before the cut.
  Result<SessionInfo> EndTruncate(int64_t length, Cut& cut, const Status& status, SessionInfo& info)
      ATTEND_REQUIRES(mutex_);
  // How much of `all` is the tenant's share.
  int64_t ShareOf(int tenant, int64_t all) const;
  // What all tables have: of all tenants, of one, or of its pinned sessions.
  struct TableUse {
    int64_t sessions = 0;
    int64_t bytes = 0;
    bool operator==(const TableUse&) const = default;
  };
  struct TenantTable {
    TableUse all;
    TableUse pinned;
    bool operator==(const TenantTable&) const = default;
  };
  // The session has so much more, or less.
  void Count(const Session& session, TableUse more) ATTEND_REQUIRES(mutex_);
  // The layer's list of pages has changed.
  void CountList(Session& session, Layer& layer) ATTEND_REQUIRES(mutex_);
  // It may have shrunk: a list that needs less than half of its memory moves to less.
  void FitList(Session& session, Layer& layer) ATTEND_REQUIRES(mutex_);
  // For `more` of the tenant's: where there is too little, sessions end of tenants that have more
  // than their share, if with it this one has no more than its own. `pinned`: what of `more` is of
  // pinned sessions, which may not go beyond the share.
  Status MakeRoom(int tenant, TableUse more, TableUse pinned) ATTEND_REQUIRES(mutex_);
  // Of one of the two numbers.
  bool Displace(int tenant, int64_t TableUse::*what, int64_t more, int64_t most)
      ATTEND_REQUIRES(mutex_);
  // A place among those that the tenant's limit allows.
  Status TakePlace(Session& session, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  // Whether the pinned sessions of the session's tenant may have so many bytes more on its device.
  Status CheckPinned(const Session& session, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  Status CheckUse(const CacheUse& use, int64_t index, const Session& session, int64_t new_rows,
                  bool& there) const ATTEND_REQUIRES(mutex_);
  Status CheckFits(const CacheHold& hold) const ATTEND_REQUIRES(mutex_);
  Status FillHold(int tenant, int64_t new_rows, CacheHold& hold) ATTEND_REQUIRES(mutex_);
  // What `refusal` says of a request that ends with `status`.
  void Explain(const Status& status, int tenant, std::span<const CacheUse> uses,
               CacheRefusal* refusal) const ATTEND_REQUIRES(mutex_);
  Status ReserveHold(CacheHold& hold, CacheRefusal* refusal, CacheHold::Firmness firmness);
  Status ConfirmHold(CacheHold& hold, CacheRefusal* refusal);
  Status TakeFor(CacheHold& hold, CacheRefusal* refusal) ATTEND_REQUIRES(mutex_);
  void CommitHold(CacheHold& hold);
  void EndHold(CacheHold& hold);
  void LetGo(CacheHold& hold) ATTEND_REQUIRES(mutex_);

  const SessionOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  mutable Mutex mutex_;
  std::vector<Pool> pools_ ATTEND_GUARDED_BY(mutex_);
  std::map<std::string, SessionRef> sessions_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::pair<TimePoint, Session*>> by_use_ ATTEND_GUARDED_BY(mutex_);
  std::set<std::pair<TimePoint, Session*>> by_lease_end_ ATTEND_GUARDED_BY(mutex_);
  ByTenant by_tenant_ ATTEND_GUARDED_BY(mutex_);  // and by id
  std::vector<TenantTable> tenants_ ATTEND_GUARDED_BY(mutex_);
  // What uses sessions now.
  struct Older {
    bool operator()(const CacheHold* a, const CacheHold* b) const {
      return a->number_ < b->number_;
    }
  };
  std::set<CacheHold*, Older> holds_ ATTEND_GUARDED_BY(mutex_);
  int64_t last_hold_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::set<const Cut*> cuts_ ATTEND_GUARDED_BY(mutex_);
  TableUse table_ ATTEND_GUARDED_BY(mutex_);  // of all tenants
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
