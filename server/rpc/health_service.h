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
  // Watches on one connection on which a call has been let in, on another, and on all such others.
  // Beyond the first two a watch is refused; beyond the third the one is ended that has been open
  // for longest, of those of the peer that has most.
  static constexpr int64_t kWatchesOfCallersMax = 64;
  static constexpr int64_t kWatchesOfStrangerMax = 8;
  static constexpr int64_t kWatchesOfStrangersMax = 1024;

  // Of these services, and of "", the whole server; none serves until SetServing. `connections`
  // tells which are strangers'; null: none, and a connection may have any number. It must outlive
  // the server.
  HealthService(const std::vector<std::string>& services, const ConnectionHolds* connections);

  void SetServing(bool serving);  // any thread
  // This must outlive the calls.
  void AddTo(CallTable& table);

 private:
  class Watcher;
  using Marks = std::shared_ptr<ConnectionMarks>;
  struct Stranger {
    Watcher* watcher = nullptr;
    Marks marks;
  };

  Status Check(const std::string& request, std::string& response);
  // The watch begins for which the request asks. May throw std::bad_alloc.
  Status Begin(Watcher& watcher, const std::string& request);
  // Which service the request names.
  static Result<std::string> ServiceOf(const std::string& request);
  // A watch on this connection may begin, whose place is made.
  Status TakePlace(const Marks& marks, Watcher* watcher) ATTEND_REQUIRES(mutex_);
  void MakeRoom() ATTEND_REQUIRES(mutex_);
  void Remove(Watcher* watcher);

  const ConnectionHolds* const connections_;
  const std::set<std::string> services_;
  Mutex mutex_;
  bool serving_ ATTEND_GUARDED_BY(mutex_) = false;
  std::set<Watcher*> watchers_ ATTEND_GUARDED_BY(mutex_);
  std::list<Stranger> strangers_ ATTEND_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace attend
