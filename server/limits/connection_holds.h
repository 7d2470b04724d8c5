// SPDX-License-Identifier: Apache-2.0
//
// The open connections and the tenants that have called over each. A connection counts towards a
// tenant's limit from the tenant's first call on it until it is closed; with calls of several
// tenants it counts for each of them.
//
// A connection is known by a unique name from Begin until the last reference that Begin returned is
// gone. Calls on an unknown name are not counted: the connection has been closed.
//
// Thread-safe. References may outlive the object.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/tenant_limits.h"
#include "server/util/connection_marks.h"

namespace attend {

class ConnectionHolds : public std::enable_shared_from_this<ConnectionHolds> {
 public:
  // An open connection.
  class Open {
   public:
    Open(std::weak_ptr<ConnectionHolds> all, std::string name,
         std::shared_ptr<const ConnectionMarks> marks)
        : all_(std::move(all)), name_(std::move(name)), marks_(std::move(marks)) {}
    ~Open();
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

    // The marks may outlive the connection.
    const std::shared_ptr<const ConnectionMarks>& marks() const { return marks_; }

   private:
    const std::weak_ptr<ConnectionHolds> all_;
    const std::string name_;
    const std::shared_ptr<const ConnectionMarks> marks_;
  };
  using Ref = std::shared_ptr<const Open>;

  // `limits` must outlive the object.
  explicit ConnectionHolds(TenantLimits& limits) : limits_(limits) {}

  // The object must be owned by a std::shared_ptr. A second Begin of a known name refers to the
  // same connection. `peer`: the client's address or user, if known.
  Ref Begin(const std::string& name, const std::string& peer = {});
  // Identifies a credential; all zeros: a caller that needs none, and never becomes invalid.
  using Credential = std::array<uint8_t, 32>;
  // At most this many credentials per connection are remembered for Recheck.
  static constexpr int64_t kCallersMax = 8;

  // Records a call of the tenant on the connection. RESOURCE_EXHAUSTED if the connection would
  // exceed the tenant's limit of connections.
  Status Call(const std::string& name, int tenant, const Credential& caller = {});
  // Null if the connection is unknown.
  std::shared_ptr<ConnectionMarks> MarksOf(const std::string& name) const;
  // Records a call that is counted for no tenant and never refused.
  void CallUncounted(const std::string& name, const Credential& caller = {});
  // Only these credentials are still valid: connections without a call by one of them are strangers
  // again.
  void Recheck(const std::set<Credential>& credentials);

 private:
  struct Entry {
    int64_t opened = 0;
    std::map<int, CountHold> tenants;
    std::set<Credential> callers;
    std::shared_ptr<ConnectionMarks> marks = std::make_shared<ConnectionMarks>();
  };

  void End(const std::string& name);
  static void LetIn(Entry& entry, const Credential& caller);

  TenantLimits& limits_;
  mutable Mutex mutex_;
  std::unordered_map<std::string, Entry> connections_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
