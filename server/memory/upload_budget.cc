// SPDX-License-Identifier: Apache-2.0

#include "server/memory/upload_budget.h"

#include <cassert>
#include <string>

namespace attend {

Result<UploadBudget::Hold> UploadBudget::Take(int64_t bytes) {
  int64_t held = held_bytes_.load(std::memory_order_relaxed);
  do {
    assert(0 <= held && held <= bytes_max_);
    if (bytes > bytes_max_ - held) {
      return ResourceExhausted("tensor memory: request needs " + std::to_string(bytes) +
                               " bytes, " + std::to_string(held) + " of the " +
                               std::to_string(bytes_max_) + " for incomplete uploads are in use");
    }
  } while (!held_bytes_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  Hold hold;
  hold.share_ = {this, {bytes}};
  return hold;
}

}  // namespace attend
