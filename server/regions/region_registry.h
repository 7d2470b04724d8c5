// SPDX-License-Identifier: Apache-2.0
//
// All shared regions, by token: host memory that the server made, and GPU memory that clients lend.
// A region belongs to the client (the connection) that made or lent it. Its token is valid from
// Create or Import to Release or RemoveClient, or until the server takes the region away
// (EndClient, DisplaceLocked). Its memory lives until the last RegionRef is gone too, and only then
// are its bytes free for others. Memory is closed on a thread of the registry's own, because that
// may wait for a device.
//
//                         Release, RemoveClient,
//   Create, Import        EndClient, DisplaceLocked        the last RegionRef          Run
//   --------------> open -------------------------> in use ------------------> unreaped ---> closed
//                                                                                 |            ^
//                                                                                 v            |
//                                                                                kept ---------+
//                                                                        Release, RemoveClient
//
// Tokens find what is open. "In use" is passed at once where no request holds the region.
//
// A tenant may have all bytes as long as no other wants them. They count as its own until they are
// closed. What it has beyond its share, by its weight, is displaced when another tenant needs the
// room within its own share: first what no request uses, the longest unused before the others. What
// a request uses stays until that ends. Until then the client that needs the room has a claim to
// it, for a bounded time, and whoever is beyond its share leaves that much free.
//
// What its client has given up is emptied when it is closed, because the client can keep the memory
// and nobody would count it any more. What the registry takes from a client (it is displaced, or
// EndClient) may hold an answer that the client has not read, or what the client will send another
// way now. So it is kept as it is, without being locked, until the client gives it up.
//
// What was displaced and is kept is in nobody's way: others get their shares beside it. But nobody
// gets more than its share unless all memory, kept or not, stays within bytes_max. So what was
// displaced and is kept never is more than bytes_max: only tenants beyond their shares lose
// regions, and when the last of them got there, their regions and all that was kept were within it.
//
// Thread-safe. A client's calls are made by the socket's thread, or where memory is lent by name
// (server/oip) by calls' threads, several at once; Find by gRPC's; and a RegionRef may be dropped
// on any. Nothing waits for a request or for memory that is being closed: who wants that room asks
// again. The registry must outlive every RegionRef.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_limits.h"
#include "server/regions/device_importer.h"
#include "server/regions/region.h"
#include "server/regions/region_memory.h"
#include "server/util/random_token.h"
#include "server/util/weight_share.h"

namespace attend {

struct RegionLimits {
  TenantWeights tenant_weights;  // the shares of bytes_max
  int64_t bytes_max = int64_t{4} << 30;
  int64_t client_bytes_max = int64_t{4} << 30;
  int64_t client_regions_max = 64;  // lent ones too, whose bytes are not counted
  // What tenants may have besides; null: no such limits. Must outlive the registry. What is no
  // tenant's counts as the first one's, like calls that name none.
  TenantLimits* tenants = nullptr;
  // How long a client may wait for regions that others give up, or that are being closed.
  Duration return_wait = std::chrono::seconds(3);
};

class RegionRegistry {
 public:
  struct Created {
    std::string token;
    int64_t bytes = 0;
    UniqueFd file;  // to be mapped by the client
  };
  struct Stats {
    int64_t clients = 0;
    int64_t regions = 0;         // in host memory, with a valid token
    int64_t bytes = 0;           // of these regions
    int64_t changing_bytes = 0;  // being made, or on their way to be closed or kept
    int64_t kept_bytes = 0;      // taken from clients that have not given them up
    int64_t created = 0;         // since the start
    int64_t refused = 0;         // since the start
    int64_t displaced = 0;       // the same: forgotten to make room for other tenants
    int64_t lent_regions = 0;    // of GPUs, from Import until they are closed
    int64_t lent_bytes = 0;
  };

  // `memory`, `clock` and `importer` must outlive the registry; `importer` is null if clients may
  // not lend memory.
  RegionRegistry(const RegionLimits& limits, RegionMemory& memory, const Clock& clock,
                 TokenSource tokens, const DeviceImporter* importer = nullptr);
  ~RegionRegistry();  // releases every region and waits until their memory is closed
  RegionRegistry(const RegionRegistry&) = delete;
  RegionRegistry& operator=(const RegionRegistry&) = delete;

  // Its regions are for requests of that tenant, or kAnyTenant, and do not exist for others.
  uint64_t AddClient(int tenant);
  // Releases all of the client's regions, kept ones too. `pages` is kKept if it is the server that
  // ends: the client may still read there, and nobody will count it.
  void RemoveClient(uint64_t client, Pages pages = Pages::kFreed);
  // The client must go, and gets no more regions; those that it has are kept until it gives them
  // up, by Release or RemoveClient. Returns whether there are any left.
  bool EndClient(uint64_t client);
  // Whether memory that the client lent is not closed yet.
  bool Lends(uint64_t client) const;
  // Whether a request uses a region of the client's, and which of all uses was the client's latest.
  struct ClientUse {
    bool in_use = false;
    uint64_t last = 0;
    auto operator<=>(const ClientUse&) const = default;  // who goes first comes first
  };
  ClientUse UseOf(uint64_t client) const;
  // INVALID_ARGUMENT for sizes that no region may have, RESOURCE_EXHAUSTED for sizes that do not
  // fit now; both name bytes, use and bound. If room is being made, `until` is set: ask again when
  // a region was closed (OnClosed), and once more then. That is no refusal yet. Without `until` it
  // is one.
  Result<Created> Create(uint64_t client, uint64_t bytes, TimePoint* until = nullptr);
  // Returns the region's token. UNIMPLEMENTED: clients may not lend memory. RESOURCE_EXHAUSTED: the
  // client has as many regions as it may; `until` as above. Otherwise the importer's error.
  Result<std::string> Import(uint64_t client, const ImportRequest& request,
                             TimePoint* until = nullptr);
  // NOT_FOUND unless the region is this client's, open or kept. Does not wait. If OK, `closed` is
  // called once: for host memory, before Release returns; for lent memory, on the registry's
  // thread, when no request uses it any more and it was closed. `closed` must not wait, nor call
  // the registry.
  Status Release(uint64_t client, const std::string& token, std::function<void()> closed = {});

  // `closed` is called on the registry's thread whenever the memory of a region was closed, or
  // unlocked to be kept. It must not wait, nor call the registry.
  void OnClosed(std::function<void()> closed);

  // Null if no region for that tenant's requests has this token.
  RegionRef Find(const std::string& token, int tenant) const;

  Stats stats() const;
  const RegionLimits& limits() const { return limits_; }

 private:
  struct Client {
    int tenant = SharedRegion::kAnyTenant;
    bool ended = false;
    std::set<std::string> tokens;               // of open regions
    std::map<std::string, SharedRegion*> kept;  // those that still are in use, too
    int64_t bytes = 0;                          // until they are closed
    int64_t regions = 0;                        // the same
    int64_t lent = 0;                           // of these
    uint64_t last_use = 0;
    TimePoint waits_since = {};  // none: it waits for no room
    // What it waits for while others give it up.
    int64_t claimed_bytes = 0;
    TimePoint claimed_until = {};
  };
  using Regions = std::unordered_map<std::string, std::shared_ptr<SharedRegion>>;
  // Host memory: open regions, those being made and those not yet closed.
  struct Bytes {
    int64_t taken = 0;
    int64_t coming = 0;  // of these: Room::kComing
    int64_t others = 0;  // of these: Room::kOthers
    int64_t held() const { return taken - others; }
    int64_t lasting() const { return held() - coming; }
  };

  // What is no tenant's counts as the first one's.
  static int TenantOf(int tenant) { return tenant < 0 ? 0 : tenant; }
  // What a region that is being made has of its tenant's limits.
  struct TenantHold {
    CountHold bytes;                        // as long as its memory is there
    int tenant = SharedRegion::kAnyTenant;  // whose it is
  };
  // These decide who gets room (region_room.cc). Reserve: with `until` as in Create.
  Status Reserve(uint64_t client, int64_t bytes, TenantHold& hold, TimePoint* until);
  Status CheckClientLocked(const Client& client, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  Status CheckLocked(const Client& client, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  int64_t ShareOf(int tenant) const;
  // What clients other than that one have claims to: of all tenants, or of one.
  int64_t ClaimedLocked(const Client& except, std::optional<int> tenant) const
      ATTEND_REQUIRES(mutex_);
  bool WithinShareLocked(const Client& client, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  // Takes what others must give up so that the client gets what is its tenant's share. The
  // references are to be let go of outside the lock.
  std::vector<RegionRef> DisplaceLocked(const Client& client, int64_t bytes)
      ATTEND_REQUIRES(mutex_);
  // Until when the client may wait for those bytes, to which it then has a claim if `displacing`.
  TimePoint WaitLocked(Client& client, int64_t bytes, bool displacing) ATTEND_REQUIRES(mutex_);
  static void EndWaitLocked(Client& client);  // it has what it waited for, or will not get it

  // Adds the region and returns its token. From now on its memory is closed like any region's.
  Result<std::string> Add(std::unique_ptr<SharedRegion> made);
  // Counts a refusal, unless the client may wait.
  Status Refuse(Status status, const TimePoint* until = nullptr);
  // The last reference is gone. Any thread.
  void Reap(SharedRegion* region);
  void PushLocked(SharedRegion* region) ATTEND_REQUIRES(mutex_);
  std::shared_ptr<SharedRegion> ForgetLocked(Regions::iterator region, Pages pages)
      ATTEND_REQUIRES(mutex_);
  // Forgets it too, but keeps it for its client, unless it is lent.
  std::shared_ptr<SharedRegion> KeepLocked(Regions::iterator region) ATTEND_REQUIRES(mutex_);
  // It is kept no longer.
  void GiveUpLocked(SharedRegion* region, Pages pages) ATTEND_REQUIRES(mutex_);
  void SetRoomLocked(SharedRegion& region, SharedRegion::Room room) ATTEND_REQUIRES(mutex_);
  // Unless it is others' room already.
  void SetComingLocked(SharedRegion& region) ATTEND_REQUIRES(mutex_);
  // Counts the bytes of its room, in all and among its tenant's.
  void CountRoomLocked(const SharedRegion& region, int sign) ATTEND_REQUIRES(mutex_);
  void UncountLocked(uint64_t client, int tenant, int64_t bytes) ATTEND_REQUIRES(mutex_);
  // The function to call when the region is closed; may be empty.
  std::function<void()> TakeClosedLocked(const SharedRegion& region) ATTEND_REQUIRES(mutex_);
  void CountOpenLocked(const SharedRegion& region, int sign) ATTEND_REQUIRES(mutex_);
  void Run();
  // Unmaps it, or gives back what was lent, without the lock.
  void CloseLocked(SharedRegion* region) ATTEND_REQUIRES(mutex_);

  const RegionLimits limits_;
  RegionMemory& memory_;
  const Clock& clock_;
  const TokenSource tokens_;
  const DeviceImporter* const importer_;

  mutable Mutex mutex_;
  CondVar changed_;
  Regions regions_ ATTEND_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Client> clients_ ATTEND_GUARDED_BY(mutex_);
  uint64_t last_client_ ATTEND_GUARDED_BY(mutex_) = 0;
  mutable uint64_t uses_ ATTEND_GUARDED_BY(mutex_) = 0;
  Bytes bytes_ ATTEND_GUARDED_BY(mutex_);
  std::vector<Bytes> tenant_bytes_ ATTEND_GUARDED_BY(mutex_);  // of these
  int64_t late_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;           // of what is coming: `late`
  Stats stats_ ATTEND_GUARDED_BY(mutex_);                      // but for clients and changing_bytes
  SharedRegion* unreaped_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  // From the first unreaped region until the last one's bytes are free.
  bool reaping_ ATTEND_GUARDED_BY(mutex_) = false;
  // While reaping_: when returning the current one began.
  TimePoint reaping_since_ ATTEND_GUARDED_BY(mutex_);
  std::function<void()> on_closed_ ATTEND_GUARDED_BY(mutex_);
  // What to call when a lent region is closed, by token.
  std::unordered_map<std::string, std::function<void()>> closed_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
