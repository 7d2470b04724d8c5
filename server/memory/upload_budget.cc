// SPDX-License-Identifier: Apache-2.0

#include "server/memory/upload_budget.h"

#include <string>

namespace attend {

UploadBudget::Hold& UploadBudget::Hold::operator=(Hold&& other) noexcept {
  if (this == &other) return *this;
  Release();
  share_ = std::exchange(other.share_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void UploadBudget::Hold::Release() {
  if (share_ != nullptr) share_->held_bytes_.fetch_sub(bytes_, std::memory_order_relaxed);
  share_ = nullptr;
  bytes_ = 0;
}

Result<UploadBudget::Hold> UploadBudget::Take(int64_t bytes) {
  int64_t held = held_bytes_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_ - held) {
      return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                               " bytes, " + std::to_string(held) + " of the " +
                               std::to_string(bytes_max_) + " for incomplete uploads are in use");
    }
  } while (!held_bytes_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  return Hold(*this, bytes);
}

}  // namespace attend
