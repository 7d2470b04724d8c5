// SPDX-License-Identifier: Apache-2.0
//
// The open connections and the tenants that have called over each. A connection counts towards a
// tenant's limit from the tenant's first call on it until it is closed; with calls of several
// tenants it counts for each of them. Thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_limits.h"
#include "server/util/connection_marks.h"

namespace attend {

class ConnectionHolds {
 public:
  // Identifies a credential; all zeros: a caller that needs none, and never becomes invalid.
  using Credential = std::array<uint8_t, 32>;
  // At most this many credentials per connection are remembered for Recheck.
  static constexpr int64_t kCallersMax = 8;

  // A connection, held by it and by its calls. May outlive the ConnectionHolds.
  class Open {
   public:
    // `peer`: the client's address or user. `limits` must outlive the object.
    Open(TenantLimits& limits, std::string peer) : limits_(limits) {
      marks_->peer = std::move(peer);
    }

    // Records a call of the tenant. RESOURCE_EXHAUSTED if the connection would exceed the tenant's
    // limit of connections.
    Status Call(int tenant, const Credential& caller = {});
    // Records a call that is counted for no tenant and never refused.
    void CallUncounted(const Credential& caller = {});
    // The connection has closed; later calls are not counted.
    void Close();
    // The marks may outlive the connection.
    const std::shared_ptr<ConnectionMarks>& marks() const { return marks_; }

   private:
    friend class ConnectionHolds;
    void LetIn(const Credential& caller) ATTEND_REQUIRES(mutex_);
    void Recheck(const std::set<Credential>& credentials);

    TenantLimits& limits_;
    const std::shared_ptr<ConnectionMarks> marks_ = std::make_shared<ConnectionMarks>();
    Mutex mutex_;
    bool closed_ ATTEND_GUARDED_BY(mutex_) = false;
    std::map<int, CountHold> tenants_ ATTEND_GUARDED_BY(mutex_);
    std::set<Credential> callers_ ATTEND_GUARDED_BY(mutex_);
  };
  using Ref = std::shared_ptr<Open>;

  // `limits` must outlive the object and its connections.
  explicit ConnectionHolds(TenantLimits& limits) : limits_(limits) {}

  Ref Begin(const std::string& peer = {});
  // Only these credentials are still valid: connections without a call by one of them are strangers
  // again.
  void Recheck(const std::set<Credential>& credentials);

 private:
  TenantLimits& limits_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Open>> open_ ATTEND_GUARDED_BY(mutex_);
  size_t swept_at_ ATTEND_GUARDED_BY(mutex_) =
      64;  // size at which those that have ended are erased
};

}  // namespace attend
