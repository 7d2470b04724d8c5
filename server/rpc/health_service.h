// SPDX-License-Identifier: Apache-2.0
//
// Health checks (grpc.health.v1), which need no credentials.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/limits/connection_holds.h"
#include "server/rpc/call_table.h"

namespace attend {

class HealthService final {
 public:
  // Bounds on watches: per connection with an accepted call; per other (unauthenticated)
  // connection; and over all of the latter. At the first two a new watch is refused. At the third,
  // the oldest watch of the peer with the most watches is ended.
  static constexpr int64_t kWatchesOfCallersMax = 64;
  static constexpr int64_t kWatchesOfStrangerMax = 8;
  static constexpr int64_t kWatchesOfStrangersMax = 1024;

  // Serves `services` and "", the whole server; not serving until SetServing. `bounded`:
  // connections may be unauthenticated; otherwise all are trusted, without bounds.
  HealthService(const std::vector<std::string>& services, bool bounded);

  void SetServing(bool serving);  // any thread
  // This must outlive the calls.
  void AddTo(CallTable& table);

 private:
  class CheckCall;
  class Watcher;
  using Marks = std::shared_ptr<ConnectionMarks>;
  struct Stranger {
    Watcher* watcher = nullptr;
    Marks marks;
  };

  Status Check(const std::string& request, std::string& response);
  // Begins the watch that the request asks for. May throw std::bad_alloc.
  Status Begin(Watcher& watcher, const std::string& request);
  // The service that the request names.
  static Result<std::string> ServiceOf(const std::string& request);
  // Counts the new watch against its connection's bounds.
  Status TakePlace(const Marks& marks, Watcher* watcher) ATTEND_REQUIRES(mutex_);
  void MakeRoom() ATTEND_REQUIRES(mutex_);
  void Remove(Watcher* watcher);

  const bool bounded_;
  const std::set<std::string> services_;
  Mutex mutex_;
  bool serving_ ATTEND_GUARDED_BY(mutex_) = false;
  std::set<Watcher*> watchers_ ATTEND_GUARDED_BY(mutex_);
  std::list<Stranger> strangers_ ATTEND_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace attend
