// SPDX-License-Identifier: Apache-2.0
//
// The part of the memory budget that requests may hold while their bytes are still arriving.
// Clients set their pace, so they must not keep memory from complete requests, nor from other
// tenants' uploads: it is divided as tenant_parts.h says. Thread-safe; must outlive its holds.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/tenant_parts.h"
#include "server/util/weight_share.h"

namespace attend {

class UploadBudget {
 public:
  // Returned by Release or the destructor. Movable; empty when default-constructed or moved from.
  class Hold {
   public:
    void Release() { share_.reset(); }

   private:
    friend class UploadBudget;
    struct Returner {
      void operator()(UploadBudget* budget) const { budget->Return(tenant, bytes); }
      int tenant;
      int64_t bytes;
    };
    std::unique_ptr<UploadBudget, Returner> share_;
  };

  // Of `budget_bytes`, uploads may hold three quarters.
  UploadBudget(int64_t budget_bytes, const TenantWeights& tenant_weights);
  UploadBudget(const UploadBudget&) = delete;
  UploadBudget& operator=(const UploadBudget&) = delete;

  // RESOURCE_EXHAUSTED names the bytes and the bound.
  Result<Hold> Take(int tenant, int64_t bytes);
  // The most that the tenant may hold while no other holds anything.
  int64_t bytes_max(int tenant) const { return parts_.own_bytes[tenant] + parts_.common_bytes; }

 private:
  // What of `held` bytes the tenant's own part has no room for.
  int64_t Beyond(int tenant, int64_t held) const;
  void AddLocked(int tenant, int64_t bytes) ATTEND_REQUIRES(mutex_);
  void Return(int tenant, int64_t bytes);

  const TenantParts parts_;
  Mutex mutex_;
  std::vector<int64_t> held_bytes_ ATTEND_GUARDED_BY(mutex_);  // by tenant
  int64_t common_held_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
};

}  // namespace attend
