// SPDX-License-Identifier: Apache-2.0

#include "server/memory/upload_budget.h"

#include <string>

namespace attend {

UploadBudget::UploadBudget(int64_t budget_bytes, const TenantWeights& tenant_weights)
    : ledger_(budget_bytes / 4 * 3, tenant_weights) {}

int64_t UploadBudget::bytes_max(int tenant) const {
  const MutexLock lock(mutex_);
  return ledger_.most(tenant);
}

void UploadBudget::Return(int tenant, int64_t bytes) {
  const MutexLock lock(mutex_);
  ledger_.Add(tenant, -bytes);
}

Result<UploadBudget::Hold> UploadBudget::Take(int tenant, int64_t bytes) {
  const MutexLock lock(mutex_);
  if (bytes > ledger_.Room(tenant)) {
    return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                             " bytes; the tenant's incomplete uploads hold " +
                             std::to_string(ledger_.held(tenant)) + " of at most " +
                             std::to_string(ledger_.most(tenant)) + ", of which " +
                             std::to_string(ledger_.own(tenant)) + " are reserved for it");
  }
  ledger_.Add(tenant, bytes);
  Hold hold;
  hold.share_ = {this, {tenant, bytes}};
  return hold;
}

}  // namespace attend
