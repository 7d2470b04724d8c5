// SPDX-License-Identifier: Apache-2.0

#include "server/memory/upload_budget.h"

#include <algorithm>
#include <cassert>
#include <string>

namespace attend {

UploadBudget::UploadBudget(int64_t budget_bytes, const TenantWeights& tenant_weights)
    : parts_(DivideByWeight(budget_bytes / 4 * 3, tenant_weights)),
      held_bytes_(tenant_weights.size()) {}

int64_t UploadBudget::Beyond(int tenant, int64_t held) const {
  return std::max<int64_t>(0, held - parts_.own_bytes[tenant]);
}

void UploadBudget::AddLocked(int tenant, int64_t bytes) {
  int64_t& held = held_bytes_[tenant];
  common_held_bytes_ += Beyond(tenant, held + bytes) - Beyond(tenant, held);
  held += bytes;
  assert(0 <= held && 0 <= common_held_bytes_ && common_held_bytes_ <= parts_.common_bytes);
}

void UploadBudget::Return(int tenant, int64_t bytes) {
  const MutexLock lock(mutex_);
  AddLocked(tenant, -bytes);
}

Result<UploadBudget::Hold> UploadBudget::Take(int tenant, int64_t bytes) {
  const MutexLock lock(mutex_);
  const int64_t held = held_bytes_[tenant];
  // A size that the tenant may never hold comes first, as adding it might overflow.
  if (bytes > bytes_max(tenant) || Beyond(tenant, held + bytes) - Beyond(tenant, held) >
                                       parts_.common_bytes - common_held_bytes_) {
    return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                             " bytes, the tenant has " + std::to_string(held) + " of the " +
                             std::to_string(bytes_max(tenant)) +
                             " for its incomplete uploads, of which " +
                             std::to_string(parts_.own_bytes[tenant]) + " are for it alone");
  }
  AddLocked(tenant, bytes);
  Hold hold;
  hold.share_ = {this, {tenant, bytes}};
  return hold;
}

}  // namespace attend
