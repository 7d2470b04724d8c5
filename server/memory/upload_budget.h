// SPDX-License-Identifier: Apache-2.0
//
// The part of the memory budget that requests may hold while their bytes are still arriving.
// Clients set their pace, so they must not keep memory from complete requests. Thread-safe; must
// outlive its holds.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/util/status.h"

namespace attend {

class UploadBudget {
 public:
  // Returned by Release or the destructor. Movable; empty when default-constructed or moved from.
  class Hold {
   public:
    void Release() { share_.reset(); }

   private:
    friend class UploadBudget;
    struct Return {
      void operator()(UploadBudget* share) const {
        share->held_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
      }
      int64_t bytes;
    };
    std::unique_ptr<UploadBudget, Return> share_;
  };

  explicit UploadBudget(int64_t budget_bytes) : bytes_max_(budget_bytes / 4 * 3) {}
  UploadBudget(const UploadBudget&) = delete;
  UploadBudget& operator=(const UploadBudget&) = delete;

  // RESOURCE_EXHAUSTED names bytes, use and bound.
  Result<Hold> Take(int64_t bytes);
  // Three quarters of the budget.
  int64_t bytes_max() const { return bytes_max_; }

 private:
  const int64_t bytes_max_;
  std::atomic<int64_t> held_bytes_{0};  // never above the bound
};

}  // namespace attend
