// SPDX-License-Identifier: Apache-2.0
//
// Enforces each tenant's bounds (tenant_bounds.h). A refused request has taken nothing; the refusal
// is counted under the limit that caused it.
//
// A request passes twice. Begin, before any work, takes a place among the requests in flight and
// charges the bytes received so far; a rate in debt refuses here, so that a refusal is cheap.
// Charge, once bytes and cost are known, charges the rest. When the request ends, its LimitHold
// returns the place and whatever was charged but not used. Bytes that were received stay charged,
// whatever becomes of the request; so do those of refused requests (Came).
//
// Thread-safe. Each call takes one tenant's lock for a few additions; calls of different tenants do
// not contend.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_bounds.h"

namespace attend {

class TenantLimits;

// A request's share of its tenant's limits; empty when made or moved from. The limits must outlive
// it.
class LimitHold {
 public:
  LimitHold() = default;
  LimitHold(LimitHold&& other) noexcept { *this = std::move(other); }
  LimitHold& operator=(LimitHold&& other) noexcept;
  ~LimitHold() { End(0, /*bytes_used=*/false, /*cost_used=*/false); }

  // Ends the request, of which `came` bytes were received. Returns its place and its unused charge;
  // of the bytes, only those that were never received.
  void End(int64_t came, bool bytes_used, bool cost_used);
  bool has_place() const { return limits_ != nullptr; }
  // Milliseconds until a retry, at least 1, if a rate refused the request; otherwise 0.
  int64_t retry_after_ms() const { return retry_after_ms_; }

 private:
  friend class TenantLimits;
  TenantLimits* limits_ = nullptr;  // null: holds no place
  int tenant_ = 0;
  bool check_ = false;
  bool small_ = false;
  int64_t begun_bytes_ = 0;  // charged by Begin, including owed bytes
  int64_t bytes_ = 0;        // the request's own bytes, charged
  int64_t cost_ = 0;
  int64_t retry_after_ms_ = 0;
};

// An amount of a counted limit; empty when made or moved from. Release or the destructor returns
// it. The limits must outlive it.
class CountHold {
 public:
  CountHold() = default;
  CountHold(CountHold&& other) noexcept { *this = std::move(other); }
  CountHold& operator=(CountHold&& other) noexcept;
  ~CountHold() { Release(); }

  void Release();

 private:
  friend class TenantLimits;
  TenantLimits* limits_ = nullptr;
  int tenant_ = 0;
  Limit limit_ = Limit::kStreams;
  int64_t amount_ = 0;
};

class TenantLimits {
 public:
  // The use of a limit. For a rate, `used` is what is missing from a full bucket, `most` its burst.
  struct Use {
    int64_t used = 0;
    int64_t most = kUnlimited;
    int64_t refused = 0;     // since the start
    int64_t per_second = 0;  // of a rate; 0: unbounded
  };

  // `clock` must outlive this.
  TenantLimits(const std::vector<TenantBounds>& bounds, const Clock& clock);
  TenantLimits(const TenantLimits&) = delete;
  TenantLimits& operator=(const TenantLimits&) = delete;

  // Replaces the bounds of the same tenants. Holds above a new bound stay; nothing more is granted.
  void Set(const std::vector<TenantBounds>& bounds);

  // RESOURCE_EXHAUSTED names the limit, its use and its bound; `hold`, which must be empty, then
  // has the time to retry. `check`: the request asks for a reference check. `came`: bytes received
  // for it.
  Status Begin(int tenant, bool check, LimitHold& hold, int64_t came = 0);
  // For a call without tensors: takes a place among small calls and one in flight, and charges the
  // received bytes; no rate refuses it.
  Status BeginSmall(int tenant, LimitHold& hold, int64_t came);
  // At most once per begun hold. `bytes`: of the whole request, received bytes included. `cost`:
  // FLOPs.
  Status Charge(int64_t bytes, double cost, LimitHold& hold);
  // Accounts for received bytes that belong to no begun request, and sent bytes that answer none.
  // They put the tenant into no debt: what the bucket cannot pay is owed and charged with the next
  // request.
  void Came(int tenant, int64_t bytes);

  // Charges bytes that belong to no request, in full; takes no place. Refuses like Begin if the
  // rate of bytes is in debt; with 0 bytes it only asks.
  Status Spend(int tenant, int64_t bytes);

  // Takes `amount`, at least 1, of a counted limit. Refuses like Begin.
  Status Take(int tenant, Limit limit, CountHold& hold, int64_t amount = 1);
  // Whether Take of this amount would succeed now.
  bool Fits(int tenant, Limit limit, int64_t amount) const;

  // For limits whose use is tracked elsewhere.
  int64_t most(int tenant, Limit limit) const;
  void CountRefusal(int tenant, Limit limit);

  int tenants() const { return static_cast<int>(tenants_.size()); }
  Use use(int tenant, Limit limit) const;

 private:
  friend class CountHold;
  friend class LimitHold;
  struct alignas(64) Tenant {
    mutable Mutex mutex;
    TenantBounds bounds ATTEND_GUARDED_BY(mutex);
    TokenBucket bytes ATTEND_GUARDED_BY(mutex);
    TokenBucket cost ATTEND_GUARDED_BY(mutex);
    // Received bytes not yet charged; the next request pays.
    int64_t owed_bytes ATTEND_GUARDED_BY(mutex) = 0;
    std::array<int64_t, kLimitCount> used ATTEND_GUARDED_BY(mutex) = {};
    std::array<int64_t, kLimitCount> refused ATTEND_GUARDED_BY(mutex) = {};
  };

  // Whether `amount` more is within the bound.
  static bool FitsLocked(const Tenant& tenant, Limit limit, int64_t amount)
      ATTEND_REQUIRES(tenant.mutex);
  static Status CheckCount(Tenant& tenant, Limit limit, int64_t amount = 1)
      ATTEND_REQUIRES(tenant.mutex);
  // `own`: units that the bucket has already been charged for this request.
  static Status CheckRate(Tenant& tenant, Limit limit, const TokenBucket& bucket, int64_t own,
                          TimePoint now, LimitHold& hold) ATTEND_REQUIRES(tenant.mutex);
  static Status CheckRates(Tenant& tenant, TimePoint now, LimitHold& hold)
      ATTEND_REQUIRES(tenant.mutex);
  static void CameLocked(Tenant& tenant, int64_t bytes, TimePoint now)
      ATTEND_REQUIRES(tenant.mutex);
  void End(const LimitHold& hold, int64_t bytes_back, int64_t cost_back);
  void Return(int tenant, Limit limit, int64_t amount);

  const Clock& clock_;
  std::vector<std::unique_ptr<Tenant>> tenants_;
};

}  // namespace attend
