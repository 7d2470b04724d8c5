// SPDX-License-Identifier: Apache-2.0
//
// When sessions end that are not used: each `lease` after its last use, unless it is in use then.
//
// Invariant: a session that is there is looked at no earlier than its lease ends, and not long
// after. To renew a lease takes no memory. Not thread-safe: under the session table's lock. Every
// call is O(log n).

#pragma once

#include <algorithm>
#include <set>
#include <utility>

#include "kernels/util/clock.h"
#include "server/sessions/session.h"

namespace attend {

class Leases {
 public:
  // The session's last use is `now`.
  void Begin(Session& session, TimePoint now) {
    session.last_used = now;
    session.look_again = now + session.lease;
    order_.insert({session.look_again, &session});
  }
  void Renew(Session& session, TimePoint now) {
    session.last_used = now;
    LookAgain(session, now + session.lease);
  }
  // One whose lease ends while it is in use is looked at again later, so that those of many
  // requests that take their time do not make each call look at them.
  void LookAgain(Session& session, TimePoint when) {
    auto entry = order_.extract({session.look_again, &session});
    entry.value().first = session.look_again = when;
    order_.insert(std::move(entry));
  }
  void End(Session& session) { order_.erase({session.look_again, &session}); }
  // One that is to be looked at; null: there is none.
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
