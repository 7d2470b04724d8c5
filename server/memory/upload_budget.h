// SPDX-License-Identifier: Apache-2.0
//
// The part of the memory budget that requests may hold while their bytes are still arriving.
// Clients set the pace of uploads, so uploads must not take memory from complete requests, nor one
// tenant's from another's: a ledger divides the budget. Thread-safe; must outlive its holds.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/ledger.h"
#include "server/util/weight_share.h"

namespace attend {

class UploadBudget {
 public:
  // Released by Release or the destructor. Movable; empty when default-constructed or moved from.
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

  // Uploads may hold three quarters of `budget_bytes`.
  UploadBudget(int64_t budget_bytes, const TenantWeights& tenant_weights);
  UploadBudget(const UploadBudget&) = delete;
  UploadBudget& operator=(const UploadBudget&) = delete;

  // RESOURCE_EXHAUSTED names the bytes and the bound.
  Result<Hold> Take(int tenant, int64_t bytes);
  // The tenant's maximum while no other tenant holds anything.
  int64_t bytes_max(int tenant) const;

 private:
  void Return(int tenant, int64_t bytes);

  mutable Mutex mutex_;
  Ledger ledger_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
