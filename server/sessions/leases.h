// SPDX-License-Identifier: Apache-2.0
//
// When unused sessions end: each one `lease` after its last use, unless it is in use at that time.
//
// Invariant: a session is looked at no earlier than the end of its lease, and not long after.
// Renewing a lease allocates nothing. Not thread-safe: guarded by the session table's lock. Every
// call but Consistent is O(log n).

#pragma once

#include <algorithm>
#include <set>
#include <utility>

#include "kernels/util/clock.h"
#include "server/sessions/session.h"

namespace attend {

class Leases {
 public:
  // Starts the lease; the last use is `now`.
  void Begin(Session& session, TimePoint now) {
    session.last_used = now;
    session.look_again = now + session.lease;
    order_.insert({session.look_again, &session});
  }
  void Renew(Session& session, TimePoint now) {
    session.last_used = now;
    LookAgain(session, now + session.lease);
  }
  // Postpones a session whose lease ends while it is in use, so that slow requests on many sessions
  // do not make every call look at them again.
  void LookAgain(Session& session, TimePoint when) {
    auto entry = order_.extract({session.look_again, &session});
    entry.value().first = session.look_again = when;
    order_.insert(std::move(entry));
  }
  void End(Session& session) { order_.erase({session.look_again, &session}); }
  // A session that is due to be looked at; null: none.
  Session* Due(TimePoint now) const {
    return order_.empty() || order_.begin()->first > now ? nullptr : order_.begin()->second;
  }

  static bool Over(const Session& session, TimePoint now) {
    return session.in_use == 0 && session.last_used + session.lease <= now;
  }
  bool Consistent() const {
    return std::all_of(order_.begin(), order_.end(), [](const auto& entry) {
      const Session& session = *entry.second;
      return entry.first == session.look_again &&
             session.look_again >= session.last_used + session.lease;
    });
  }
  int64_t count() const { return std::ssize(order_); }

 private:
  std::set<std::pair<TimePoint, Session*>> order_;
};

}  // namespace attend
