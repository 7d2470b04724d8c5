// SPDX-License-Identifier: Apache-2.0
//
// Holds each tenant to its bounds (tenant_bounds.h). What is refused took nothing, and is counted
// by the limit that refused it.
//
// A request passes twice. Begin, before anything is done for it, takes its place among those in
// flight and charges the bytes that have come for it; a rate that is in debt refuses it there, so
// that refusing costs little. Charge, once its bytes and its cost are known, charges the rest. Its
// hold gives its place back when it ends, and what was charged and not used. Bytes that have come
// stay charged, whatever becomes of the request, and those of a request that did not begin are too
// (Came).
//
// Thread-safe. Each call takes one tenant's lock, for a few additions; calls of different tenants
// do not meet.

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

// What a request holds of its tenant's limits; empty when made or moved from. The limits must
// outlive it.
class LimitHold {
 public:
  LimitHold() = default;
  LimitHold(LimitHold&& other) noexcept { *this = std::move(other); }
  LimitHold& operator=(LimitHold&& other) noexcept;
  ~LimitHold() { End(0, /*bytes_used=*/false, /*cost_used=*/false); }

  // The request has ended, for which `came` bytes came. Gives back its place, and what it did not
  // use: of its bytes, no more than those that have not come.
  void End(int64_t came, bool bytes_used, bool cost_used);
  bool has_place() const { return limits_ != nullptr; }
  // When a request that a rate refused may come again, from 1 up; 0: no rate refused it.
  int64_t retry_after_ms() const { return retry_after_ms_; }

 private:
  friend class TenantLimits;
  TenantLimits* limits_ = nullptr;  // null: it has no place
  int tenant_ = 0;
  bool check_ = false;
  bool small_ = false;
  int64_t begun_bytes_ = 0;  // charged when it began, with what was owed
  int64_t bytes_ = 0;        // its own, charged
  int64_t cost_ = 0;
  int64_t retry_after_ms_ = 0;
};

// Some of a limit that is counted; empty when made or moved from. Returned by Release or the
// destructor. The limits must outlive it.
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
  // How much of a limit is in use. Of a rate: what is missing from a full bucket, and its burst.
  struct Use {
    int64_t used = 0;
    int64_t most = kUnlimited;
    int64_t refused = 0;     // since the start
    int64_t per_second = 0;  // of a rate; 0: it has no bound
  };

  // Bounds of each tenant. `clock` must outlive this.
  TenantLimits(const std::vector<TenantBounds>& bounds, const Clock& clock);
  TenantLimits(const TenantLimits&) = delete;
  TenantLimits& operator=(const TenantLimits&) = delete;

  // New bounds of the same tenants. What is held beyond them stays, and is not added to.
  void Set(const std::vector<TenantBounds>& bounds);

  // RESOURCE_EXHAUSTED names the limit, what is in use, and the bound; `hold`, which must be empty,
  // then knows when to come again. `check`: the request asks for a reference check. `came`: bytes
  // that have come for it.
  Status Begin(int tenant, bool check, LimitHold& hold, int64_t came = 0);
  // The same for a call without tensors: it takes a place there, and one among those, and is
  // charged what came, but no rate refuses it.
  Status BeginSmall(int tenant, LimitHold& hold, int64_t came);
  // Once for each hold that was begun. `bytes`: all of the request, with what came. `cost`: FLOPs.
  Status Charge(int64_t bytes, double cost, LimitHold& hold);
  // What came and is no message of a request that has begun, or left as no answer of one. It puts
  // its tenant into no debt: what the rate does not have now is owed with the next request.
  void Came(int tenant, int64_t bytes);

  // Charges what is done for no request, in full, and takes no place. Refused as Begin does, if the
  // rate of bytes is in debt already; of 0 bytes it is only asked.
  Status Spend(int tenant, int64_t bytes);

  // Takes `amount`, from 1 up, of a limit that is counted. Refuses as Begin does.
  Status Take(int tenant, Limit limit, CountHold& hold, int64_t amount = 1);
  // Whether so much could be taken now.
  bool Fits(int tenant, Limit limit, int64_t amount) const;

  // For limits whose use others know.
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
    // Bytes that came and were not charged, since a request was taken.
    int64_t owed_bytes ATTEND_GUARDED_BY(mutex) = 0;
    std::array<int64_t, kLimitCount> used ATTEND_GUARDED_BY(mutex) = {};
    std::array<int64_t, kLimitCount> refused ATTEND_GUARDED_BY(mutex) = {};
  };

  // Whether so much more is within the bound.
  static bool FitsLocked(const Tenant& tenant, Limit limit, int64_t amount)
      ATTEND_REQUIRES(tenant.mutex);
  static Status CheckCount(Tenant& tenant, Limit limit, int64_t amount = 1)
      ATTEND_REQUIRES(tenant.mutex);
  // `own`: units of the bucket that the request itself has been charged.
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
