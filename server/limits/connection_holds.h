// SPDX-License-Identifier: Apache-2.0
//
// The open connections, and whose calls have come over each. A connection counts among a tenant's
// from its first call of that tenant until it is closed; who speaks for several tenants over one
// connection counts for each of them.
//
// A connection has the name by which its calls are told apart from those of others. It is known
// here from Begin until the last reference to what Begin returns is gone. Calls of a connection
// that is not known are not counted: it has been closed meanwhile.
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
  // A connection that is open.
  class Open {
   public:
    Open(std::weak_ptr<ConnectionHolds> all, std::string name,
         std::shared_ptr<const ConnectionMarks> marks)
        : all_(std::move(all)), name_(std::move(name)), marks_(std::move(marks)) {}
    ~Open();
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

    // They may outlive the connection.
    const std::shared_ptr<const ConnectionMarks>& marks() const { return marks_; }

   private:
    const std::weak_ptr<ConnectionHolds> all_;
    const std::string name_;
    const std::shared_ptr<const ConnectionMarks> marks_;
  };
  using Ref = std::shared_ptr<const Open>;

  // `limits` must outlive the object.
  explicit ConnectionHolds(TenantLimits& limits) : limits_(limits) {}

  // The object must be owned by a std::shared_ptr. A second connection of a name that is known is
  // the same as the first. `peer` is whose machine or user it is, if that is known.
  Ref Begin(const std::string& name, const std::string& peer = {});
  // By which a caller is known; zeros: of who may call for good.
  using Credential = std::array<uint8_t, 32>;
  // Of so many callers of a connection it is known that they are some.
  static constexpr int64_t kCallersMax = 8;

  // A call of the tenant has come over the connection. RESOURCE_EXHAUSTED if that is one connection
  // too many for it.
  Status Call(const std::string& name, int tenant, const Credential& caller = {});
  // Null if the connection is not known.
  std::shared_ptr<ConnectionMarks> MarksOf(const std::string& name) const;
  // A call that is no tenant's in particular, and never refused for this.
  void CallUncounted(const std::string& name, const Credential& caller = {});
  // Callers with other credentials than these are none any more: connections on which nobody else
  // has called are strangers' again.
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
