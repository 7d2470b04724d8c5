// SPDX-License-Identifier: Apache-2.0
//
// All shared regions, by token: host memory that the server made, and GPU memory that clients lend.
// A region belongs to the client (the connection) that made or lent it. Its token is valid from
// Create or Import to Release or RemoveClient, or until the server ends the client (EndClient). Its
// memory lives until the last RegionRef is gone too, and only then are its bytes free for others.
// Memory is closed on a thread of the registry's own, because that may wait for a device.
//
//   Create, Import         Release, RemoveClient          the last RegionRef          Run
//   --------------> open ------------------------> in use ------------------> unreaped ---> closed
//
// Tokens find what is open, unless its client has been ended. "In use" is passed at once where no
// request holds the region.
//
// A ledger says which tenant may have how many bytes. They count as its own until they are closed.
// The registry takes no region from a client for another's. What a client has given up is emptied
// when it is closed, because the client can keep the memory and nothing would count it any more. An
// ended client's regions may hold an answer that it has not read: they stay as they are, and count,
// until the client gives them up.
//
// Thread-safe. A client's calls are made by the socket's thread, or where memory is lent by name
// (server/oip) by calls' threads, several at once; Find by gRPC's; and a RegionRef may be dropped
// on any. Nothing waits for a request or for memory that is being closed: a client that wants that
// room asks again. The registry must outlive every RegionRef.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_limits.h"
#include "server/memory/ledger.h"
#include "server/regions/device_importer.h"
#include "server/regions/region.h"
#include "server/regions/region_memory.h"
#include "server/util/random_token.h"
#include "server/util/weight_share.h"

namespace attend {

struct RegionLimits {
  TenantWeights tenant_weights;  // by which bytes_max is divided
  int64_t bytes_max = int64_t{4} << 30;
  int64_t client_bytes_max = int64_t{4} << 30;
  int64_t client_regions_max = 64;  // lent ones too, whose bytes are not counted
  // Tenants' limits besides; null: there are none. Must outlive the registry. Regions without a
  // tenant count as the first one's, like calls that name none.
  TenantLimits* tenants = nullptr;
  // How long a client may wait for regions that are being closed.
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
    int64_t regions = 0;         // in host memory, that clients have not given up
    int64_t bytes = 0;           // of these regions
    int64_t changing_bytes = 0;  // being made, or on their way to be closed
    int64_t created = 0;         // since the start
    int64_t refused = 0;         // since the start
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
  // Releases all of the client's regions. `pages` is kKept if it is the server that ends: the
  // client may still read there, and nothing will count it.
  void RemoveClient(uint64_t client, Pages pages = Pages::kFreed);
  // The client must go: it gets no more regions, and requests find none of those that it has. What
  // it lent is closed; the rest stays until it gives it up, by Release or RemoveClient. Returns
  // whether there is any left.
  bool EndClient(uint64_t client);
  // Whether memory that the client lent is not closed yet.
  bool Lends(uint64_t client) const;
  // INVALID_ARGUMENT for sizes that no region may have, RESOURCE_EXHAUSTED for sizes that do not
  // fit now; both name bytes, use and bound. If memory is being closed, `until` is set: ask again
  // when a region was closed (OnClosed), and once more then. That is no refusal yet. Without
  // `until` it is one.
  Result<Created> Create(uint64_t client, uint64_t bytes, TimePoint* until = nullptr);
  // Returns the region's token. UNIMPLEMENTED: clients may not lend memory. RESOURCE_EXHAUSTED: the
  // client has as many regions as it may; `until` as above. Otherwise the importer's error.
  Result<std::string> Import(uint64_t client, const ImportRequest& request,
                             TimePoint* until = nullptr);
  // NOT_FOUND unless the region is this client's. Does not wait. If OK, `closed` is
  // called once: for host memory, before Release returns; for lent memory, on the registry's
  // thread, when no request uses it any more and it was closed. `closed` must not wait, nor call
  // the registry.
  Status Release(uint64_t client, const std::string& token, std::function<void()> closed = {});

  // `closed` is called on the registry's thread whenever the memory of a region was closed. It must
  // not wait, nor call the registry.
  void OnClosed(std::function<void()> closed);

  // Null if no region for that tenant's requests has this token.
  RegionRef Find(const std::string& token, int tenant) const;

  Stats stats() const;
  const RegionLimits& limits() const { return limits_; }

 private:
  struct Client {
    int tenant = SharedRegion::kAnyTenant;
    bool ended = false;
    std::set<std::string> tokens;  // of open regions
    int64_t bytes = 0;             // until they are closed
    int64_t regions = 0;           // the same
    int64_t lent = 0;              // of these
    TimePoint waits_since = {};    // none: it waits for no room
  };
  using Regions = std::unordered_map<std::string, std::shared_ptr<SharedRegion>>;
  // Regions without a tenant count as the first one's.
  static int TenantOf(int tenant) { return tenant < 0 ? 0 : tenant; }
  // The part of its tenant's limits that a region has while it is being made.
  struct TenantHold {
    CountHold bytes;                        // as long as its memory is there
    int tenant = SharedRegion::kAnyTenant;  // whose it is
  };
  // These decide who gets room (region_room.cc). Reserve: with `until` as in Create.
  Status Reserve(uint64_t client, int64_t bytes, TenantHold& hold, TimePoint* until);
  Status CheckLocked(const Client& client, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  // Until when the client may wait for memory that is being closed.
  TimePoint WaitLocked(Client& client) ATTEND_REQUIRES(mutex_);

  // Adds the region and returns its token. From now on its memory is closed like any region's.
  Result<std::string> Add(std::unique_ptr<SharedRegion> made);
  // Counts a refusal, unless the client may wait.
  Status Refuse(Status status, const TimePoint* until = nullptr);
  // The last reference is gone. Any thread.
  void Reap(SharedRegion* region);
  std::shared_ptr<SharedRegion> ForgetLocked(Regions::iterator region, Pages pages)
      ATTEND_REQUIRES(mutex_);
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
  Ledger ledger_ ATTEND_GUARDED_BY(mutex_);  // bytes of host memory, until they are closed
  Stats stats_ ATTEND_GUARDED_BY(mutex_);    // except clients and changing_bytes
  SharedRegion* unreaped_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  // From the first unreaped region until the last one's bytes are free.
  bool reaping_ ATTEND_GUARDED_BY(mutex_) = false;
  // While reaping_: when returning the current one began.
  TimePoint reaping_since_ ATTEND_GUARDED_BY(mutex_);
  std::function<void()> on_closed_ ATTEND_GUARDED_BY(mutex_);
  // Called when a lent region is closed, by token.
  std::unordered_map<std::string, std::function<void()>> closed_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
