// SPDX-License-Identifier: Apache-2.0
//
// All shared regions, by token: host memory made by the server, and GPU memory lent by clients. A
// region belongs to the client (connection) that made or lent it. Its token is valid from Create or
// Import to Release or RemoveClient, or until the server ends the client (EndClient). Its memory
// lives until the last RegionRef is gone; only then are its bytes available to others. Memory is
// closed on the registry's own thread, because that may wait for a device.
//
//   Create, Import         Release, RemoveClient          the last RegionRef          Run
//   --------------> open ------------------------> in use ------------------> unreaped ---> closed
//
// Tokens find open regions, unless the client has been ended. A region that no request holds passes
// through "in use" at once.
//
// A ledger bounds each tenant's bytes, which count until they are closed. No region is taken from
// one client for another. A region that its client has given up is emptied when it is closed,
// because the client can keep the memory, which nothing counts any more. Regions of an ended client
// may hold an answer that it has not read: they are left unchanged, and count, until the client
// gives them up.
//
// Thread-safe. A client's calls are made by the socket's thread or, for memory lent by name
// (server/oip), concurrently by the threads of calls. Find is called by the threads of calls, and a
// RegionRef may be dropped on any thread. Nothing waits for a request or for memory that is being
// closed: the client retries. The registry must outlive every RegionRef.

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
  TenantWeights tenant_weights;  // divide bytes_max
  int64_t bytes_max = int64_t{4} << 30;
  int64_t client_bytes_max = int64_t{4} << 30;
  int64_t client_regions_max = 64;  // includes lent regions, whose bytes are not counted
  // Further per-tenant limits; null: none. Must outlive the registry. Regions without a tenant
  // count as the first tenant's, like calls that name none.
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
    int64_t regions = 0;         // in host memory, not given up by their clients
    int64_t bytes = 0;           // of these regions
    int64_t changing_bytes = 0;  // being made, or waiting to be closed
    int64_t created = 0;         // since the start
    int64_t refused = 0;         // since the start
    int64_t lent_regions = 0;    // on GPUs, from Import until closed
    int64_t lent_bytes = 0;
  };

  // `memory`, `clock` and `importer` must outlive the registry; `importer` is null if clients may
  // not lend memory.
  RegionRegistry(const RegionLimits& limits, RegionMemory& memory, const Clock& clock,
                 TokenSource tokens, const DeviceImporter* importer = nullptr);
  ~RegionRegistry();  // releases every region and waits until all memory is closed
  RegionRegistry(const RegionRegistry&) = delete;
  RegionRegistry& operator=(const RegionRegistry&) = delete;

  // Its regions are for requests of `tenant` or, with kAnyTenant, of any; they do not exist for
  // others.
  uint64_t AddClient(int tenant);
  // Releases all of the client's regions. `pages` is kKept when the server shuts down: the client
  // may still read them, and nothing will count them.
  void RemoveClient(uint64_t client, Pages pages = Pages::kFreed);
  // Ends a client: it gets no more regions, and requests no longer find those it has. Lent regions
  // are closed; the others stay until the client gives them up, by Release or RemoveClient. Returns
  // whether any are left.
  bool EndClient(uint64_t client);
  // Whether memory lent by the client is not closed yet.
  bool Lends(uint64_t client) const;
  // INVALID_ARGUMENT: a size that can never fit. RESOURCE_EXHAUSTED: a size that does not fit now.
  // Both name bytes, use and bound. If memory is being closed and `until` is not null, sets it:
  // retry when a region has been closed (OnClosed), and once more at that time. This does not count
  // as a refusal yet. Without `until` it does.
  Result<Created> Create(uint64_t client, uint64_t bytes, TimePoint* until = nullptr);
  // Returns the region's token. UNIMPLEMENTED: clients may not lend memory. RESOURCE_EXHAUSTED: the
  // client has its maximum number of regions; `until` as in Create. Otherwise the importer's error.
  Result<std::string> Import(uint64_t client, const ImportRequest& request,
                             TimePoint* until = nullptr);
  // NOT_FOUND unless the region is this client's. Does not wait. If OK, `closed` is called once:
  // for host memory, before Release returns; for lent memory, on the registry's thread, after the
  // last request has stopped using it and it was closed. `closed` must not wait or call the
  // registry.
  Status Release(uint64_t client, const std::string& token, std::function<void()> closed = {});

  // `closed` is called on the registry's thread whenever a region's memory has been closed. It must
  // not wait or call the registry.
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
    int64_t regions = 0;           // until they are closed
    int64_t lent = 0;              // how many of these are lent
    TimePoint waits_since = {};    // unset: not waiting for memory
  };
  using Regions = std::unordered_map<std::string, std::shared_ptr<SharedRegion>>;
  // Regions without a tenant count as the first tenant's.
  static int TenantOf(int tenant) { return tenant < 0 ? 0 : tenant; }
  // A new region's use of its tenant's limits.
  struct TenantHold {
    CountHold bytes;                        // held as long as the memory exists
    int tenant = SharedRegion::kAnyTenant;  // the region's tenant
  };
  // Admission of regions (region_room.cc). Reserve sets `until` as Create does.
  Status Reserve(uint64_t client, int64_t bytes, TenantHold& hold, TimePoint* until);
  Status CheckLocked(const Client& client, int64_t bytes) const ATTEND_REQUIRES(mutex_);
  // Until when the client may wait for memory that is being closed.
  TimePoint WaitLocked(Client& client) ATTEND_REQUIRES(mutex_);

  // Adds the region and returns its token. From then on its memory is closed like any other's.
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
  // Unmaps host memory or returns lent memory; releases the lock while doing so.
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
  Ledger ledger_ ATTEND_GUARDED_BY(mutex_);  // bytes of host memory, until closed
  Stats stats_ ATTEND_GUARDED_BY(mutex_);    // without clients and changing_bytes
  SharedRegion* unreaped_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  // From the first unreaped region until the last one has been closed.
  bool reaping_ ATTEND_GUARDED_BY(mutex_) = false;
  // While reaping_: when closing the current region began.
  TimePoint reaping_since_ ATTEND_GUARDED_BY(mutex_);
  std::function<void()> on_closed_ ATTEND_GUARDED_BY(mutex_);
  // Called when a lent region is closed, by token.
  std::unordered_map<std::string, std::function<void()>> closed_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
