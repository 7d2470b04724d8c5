// SPDX-License-Identifier: Apache-2.0
//
// Picks the refusal to report when several devices have refused a request: one where waiting helps,
// with the shortest wait.

#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/util/status.h"
#include "server/request/request.h"

namespace attend {

class LeastRefusal {
 public:
  // A device refused with `status` and these details.
  void Add(Status status, const Refusal& refusal) {
    const int64_t rank = Rank(status, refusal);
    if (!status_.ok() && rank >= rank_) return;
    status_ = std::move(status);
    rank_ = rank;
    retry_after_ms_ = refusal.retry_after_ms;
  }
  // The chosen refusal; OK if none was added.
  Status Tell(Refusal& refusal) const {
    refusal.retry_after_ms = retry_after_ms_;
    return status_;
  }

 private:
  static int64_t Rank(const Status& status, const Refusal& refusal) {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    if (status.code() != Code::kResourceExhausted) return kMost;
    return refusal.retry_after_ms > 0 ? refusal.retry_after_ms : kMost - 1;
  }

  Status status_;
  int64_t rank_ = 0;
  int64_t retry_after_ms_ = 0;
};

}  // namespace attend
